"""FLOPs of programs whose shapes change: those of an analysis at each execution, without the analyses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelined import let_torchvision_load
from torch import Tensor, nn

import amanda
from amanda.tools.flops import Cost, FlopsTool

Step = Callable[[int], Any]


class Counting(FlopsTool):
    """Counts its analyses too."""

    analyses = 0

    def _analyze_forward(self, context: amanda.OpContext) -> None:
        self.analyses += 1
        super()._analyze_forward(context)

    def _analyze_backward(self, context: amanda.OpContext) -> None:
        self.analyses += 1
        super()._analyze_backward(context)


def compare(step: Step, numbers: list[int]) -> list[int]:
    """Compare each step with the cache to the same without it; return how many analyses each took."""
    cached, fresh, taken = Counting(), FlopsTool(), list[int]()
    for number in numbers:
        told = []
        for tool, cache in ((cached, nullcontext()), (fresh, amanda.cache_disabled())):
            tool.clear()
            before = cached.analyses
            with amanda.apply(tool), cache:
                step(number)
            result = tool.result
            rows = sorted(map(str, result.rows()))
            told.append((rows, result._facts()["totals"], dict(result.unsupported)))
            taken += [cached.analyses - before] if tool is cached else []
        assert told[0] == told[1], number
    assert taken[0] > 0
    return taken


class Decoder(nn.Module):
    """Attention over all tokens so far, of which the keys and values are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in self.inner[:3])
        self.kept = [torch.cat(pair, 2) for pair in zip(self.kept, (k, v), strict=True)] or [k, v]
        keys, values = (one.repeat_interleave(1, 1) for one in self.kept)
        mask = torch.ones(x.shape[1], keys.shape[2]).bool()
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return x + F.silu(self.inner[3](attended.transpose(1, 2).flatten(2)))


def test_a_decoder_with_a_growing_cache_is_analysed_for_two_tokens() -> None:
    model = Decoder()

    @torch.no_grad()
    def step(number: int) -> None:
        model.kept = [torch.ones(1, 2, number, 4)] * 2
        model(torch.ones(1, 1, 8))

    taken = compare(step, [3, 4, 5, 6, 7, 4, 40])
    assert taken[1:] == [0] * 6


class Experts(nn.Module):
    """Tokens go to the expert that the data choose."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(6, count)
        self.up = nn.Parameter(torch.rand(count, 16, 6))
        self.down = nn.Parameter(torch.rand(count, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(1)
        result = torch.zeros_like(x)
        for expert in range(len(self.up)):
            tokens, _ = torch.where(chosen == expert)
            gate, up = F.linear(x[tokens], self.up[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down[expert]) * weights[tokens]
            result.index_add_(0, tokens, y)
        return result


def test_experts_that_the_data_choose_are_analysed_once() -> None:
    torch.manual_seed(0)
    model = Experts()

    def step(number: int) -> None:
        torch.manual_seed(number)
        model(torch.randn(12 + number, 6)).square().sum().backward()
        model.zero_grad()

    taken = compare(step, [0, 0, 1, 2, 3, 4, 1])
    assert taken[2:] == [0] * 5


def test_a_convolutional_net_with_batches_of_several_sizes() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, groups=2), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        nn.LogSoftmax(-1),
    )  # fmt: skip

    def step(number: int) -> None:
        model(torch.ones(2 + number, 3, 16 + number, 16)).sum().backward()
        model.zero_grad()

    compare(step, [0, 1, 2, 1, 0, 3])


PROGRAMS: dict[str, Step] = {
    "copies that are none": lambda n: torch.ones(2, n, 3).transpose(1, 2).contiguous(),
    "what the data choose": lambda n: torch.arange(9.0)[torch.arange(9) < n].mul(2).sum(),
    "positions": lambda n: torch.nonzero(torch.arange(9) < n),
    "slices": lambda n: torch.arange(9.0)[:n].exp(),
    "rows": lambda n: [one + 1 for one in torch.ones(n - 1, 3).unbind(0)],
    "parts": lambda n: torch.ones(6, n).chunk(n),
    "numbers that follow the shape": lambda n: F.avg_pool2d(torch.ones(1, 2, n, n), n),
    "in place": lambda n: torch.ones(n, 3).add_(torch.ones(n, 1)).relu_(),
    "lists": lambda n: torch.cat([torch.ones(n, 2), torch.ones(3, 2)]),
    "random numbers": lambda n: torch.rand(n).mul_(2),
    "norms": lambda n: F.layer_norm(torch.ones(n, 4), (4,)),
    "reductions": lambda n: torch.ones(n, 4).softmax(0).sum(1).mean(),
    "another dtype": lambda n: torch.ones(n, 4).to(torch.float64).add(1),
    "one that no formula knows": lambda n: torch.logdet(torch.eye(n) + 1),
    "vectors": lambda n: torch.ones(n) @ torch.ones(n, 3),
    "batched": lambda n: torch.ones(2, n, 3) @ torch.ones(2, 3, n),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_costs_by_shape_costs_what_it_does_analysed_anew(name: str) -> None:
    module = nn.Module()
    module.forward = PROGRAMS[name]
    compare(module, [2, 2, 3, 1, 4, 2, 3])


def test_an_op_whose_backward_op_is_another_ops() -> None:
    def step(number: int) -> None:
        F.instance_norm(torch.rand(2, 3, number, requires_grad=True)).square().sum().backward()

    compare(step, [4, 5, 4, 6])


def test_gradients_belong_to_the_execution_whose_they_are() -> None:
    weight = torch.rand(3, 5, requires_grad=True)

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.exp() * 2, weight).relu()

    model = Two()

    def step(number: int) -> None:
        results = [model(torch.ones(n, 5, requires_grad=n > 1)).sum() for n in (number, 1, number + 2)]
        for result in reversed(results):
            result.backward()

    compare(step, [1, 2, 2, 3, 1])


def test_gradients_of_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 1))

    def step(number: int) -> None:
        x = torch.ones(number, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    def counted(tool: FlopsTool, number: int) -> Any:
        tool.clear()
        with amanda.apply(tool):
            step(number)
        return tool.result._facts()["totals"]

    tool = FlopsTool()
    for number in (1, 1, 1, 2, 3, 1):
        told, alone = counted(tool, number), FlopsTool()
        assert told == [counted(alone, number) for _ in range(3)][-1]


def test_formulas_of_the_users_are_asked_for_each_shape() -> None:
    asked: list[Any] = []

    def formula(op: Any) -> Cost:
        asked.append(op.inputs[0])
        return Cost(0, 10 * op.elements)

    tool, model = FlopsTool({"relu": formula}), nn.ReLU()
    with amanda.apply(tool):
        for n in (1, 2, 2, 3, 1):
            model(torch.ones(n))
    assert asked == [(1,), (2,), (3,)]
    assert sum(place.calls * (place.flops or 0) for place in tool.result.ops if place.type == "relu") == 90


def test_costs_are_remembered_of_so_many_shapes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_SHAPES", "MAX_COSTS"):
        monkeypatch.setattr(f"amanda.tools.flops._by_shape.{name}", 8)
    tool, model = FlopsTool(), nn.ReLU()
    with amanda.apply(tool):
        for n in range(1, 30):
            model(torch.ones(n))
    assert len(tool._cost_by_shapes) <= 8
    assert all(len(op) <= 8 for ops in tool._counts_by_op.values() for op in ops.values())
    assert sum(one.calls * (one.flops or 0) for one in tool.result.ops if one.type == "relu") == 435


def test_counts_of_ops_that_are_gone_stay() -> None:
    tool = FlopsTool()
    for n in range(1, 20):
        model = nn.ReLU()
        with amanda.apply(tool):
            model(torch.ones(n))
        del model
    assert len(tool._counts_by_op) < 10
    assert sum(one.calls * (one.flops or 0) for one in tool.result.ops if one.type == "relu") == 190


def test_a_result_does_not_change_and_reading_one_changes_nothing() -> None:
    tool, model = FlopsTool(), nn.ReLU()
    with amanda.apply(tool):
        model(torch.ones(3))
        first = tool.result
        model(torch.ones(3))
        model(torch.ones(4))
    assert [first.total(), tool.result.total(), tool.result.total()] == [3, 10, 10]
    tool.clear()
    assert tool.result.total() == 0
    with amanda.apply(tool):
        model(torch.ones(4))
    assert tool.result.total() == 4


def test_without_the_cache_one_place_counts_all_executions() -> None:
    tool, model = FlopsTool(), nn.ReLU()
    with amanda.apply(tool), amanda.cache_disabled():
        for _ in range(5):
            model(torch.ones(3))
    assert [one.calls for one in tool.result.ops if one.type == "relu"] == [5]
    assert sum(len(ops) for ops in tool._counts_by_op.values()) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_models_of_transformers(name: str) -> None:
    let_torchvision_load()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    more = {} if name == "Llama" else {"num_local_experts": 4, "experts_implementation": "eager"}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, eos_token_id=None, **more,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config)

    def step(number: int) -> None:
        torch.manual_seed(number)
        x = torch.randint(1, 64, (2, 9 + number))
        if name == "Llama":
            model.generate(x, max_new_tokens=5 + number, do_sample=False)
        else:
            model(input_ids=x, labels=x).loss.backward()
            model.zero_grad()

    taken = compare(step, [0, 1, 2, 3, 1])
    assert sum(taken[2:]) < taken[0] / 10
