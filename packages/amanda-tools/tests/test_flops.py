"""FLOPs: against closed formulas, against torch's own counter where that is right, and where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import amanda
from amanda.errors import AmandaError
from amanda.tools import results
from amanda.tools.flops import Cost, FlopsResult, FlopsTool, Shapes


def counted(program: Callable[[], Any], tool: FlopsTool | None = None) -> FlopsTool:
    tool = tool or FlopsTool()
    with amanda.apply(tool):
        program()
    return tool


def macs(program: Callable[[], Any], phase: str | None = None) -> int:
    return counted(program).result.total("macs", phase)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, requires_grad=True)


PRODUCTS = {
    "linear": (lambda: F.linear(rand(5, 3), rand(7, 3), rand(7)), 5 * 3 * 7),
    "linear, three axes": (lambda: F.linear(rand(2, 5, 3), rand(7, 3)), 2 * 5 * 3 * 7),
    "matmul": (lambda: rand(4, 5, 3) @ rand(4, 3, 7), 4 * 5 * 3 * 7),
    "matmul with a vector": (lambda: rand(5, 3) @ rand(3), 5 * 3),
    "vector by matrix": (lambda: rand(3) @ rand(3, 5), 5 * 3),
    "dot": (lambda: rand(3) @ rand(3), 3),
    "matmul, one matrix for all": (lambda: rand(4, 5, 3) @ rand(3, 7), 4 * 5 * 3 * 7),
    "addmm": (lambda: torch.addmm(rand(7), rand(5, 3), rand(3, 7)), 5 * 3 * 7),
    "baddbmm": (lambda: torch.baddbmm(rand(2, 5, 7), rand(2, 5, 3), rand(2, 3, 7)), 2 * 5 * 3 * 7),
    "conv1d": (lambda: F.conv1d(rand(2, 4, 9), rand(6, 4, 3)), 2 * 6 * 7 * 4 * 3),
    "conv2d": (lambda: F.conv2d(rand(2, 4, 8, 8), rand(6, 4, 3, 3), rand(6)), 2 * 6 * 36 * 4 * 9),
    "grouped": (lambda: F.conv2d(rand(2, 4, 8, 8), rand(6, 2, 3, 3), groups=2), 2 * 6 * 36 * 2 * 9),
    "depthwise": (lambda: F.conv2d(rand(2, 4, 8, 8), rand(4, 1, 3, 3), groups=4), 2 * 4 * 36 * 9),
    "conv_transpose2d": (lambda: F.conv_transpose2d(rand(2, 4, 5, 5), rand(4, 6, 3, 3)), 200 * 6 * 9),
    "conv3d": (lambda: F.conv3d(rand(1, 2, 4, 4, 4), rand(3, 2, 2, 2, 2)), 3 * 27 * 2 * 8),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_costs_what_its_formula_says(name: str) -> None:
    program, expected = PRODUCTS[name]
    assert macs(program) == expected


OF_VECTORS = {"dot", "vector by matrix", "matmul with a vector"}
"""Their gradients are outer products, for which autograd multiplies elements."""


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in OF_VECTORS])
def test_both_gradients_of_a_product_cost_as_much_again(name: str) -> None:
    program, expected = PRODUCTS[name]
    assert macs(lambda: program().sum().backward(), "backward") == 2 * expected


def test_a_gradient_that_is_not_wanted_costs_nothing() -> None:
    x = torch.rand(5, 3)
    assert macs(lambda: F.linear(x, rand(7, 3)).sum().backward(), "backward") == 5 * 3 * 7


@pytest.mark.parametrize("train", [False, True])
def test_attention_costs_its_two_products_however_it_is_called(train: bool) -> None:
    q, k, v = rand(2, 4, 6, 8), rand(2, 4, 5, 8), rand(2, 4, 5, 8)
    with torch.set_grad_enabled(train):
        fused = macs(lambda: F.scaled_dot_product_attention(q, k, v), "forward")
        masked = macs(
            lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(6, 5, dtype=torch.bool)),
            "forward",
        )
        by_hand = macs(lambda: (q @ k.transpose(-1, -2)).softmax(-1) @ v, "forward")
    assert fused == masked == by_hand == 2 * 4 * 6 * 5 * 16


def test_the_fast_path_of_an_encoder_layer_costs_what_the_slow_one_does() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.rand(2, 6, 16)
    with torch.no_grad():
        fast = counted(lambda: layer(x)).result
        layer.activation_relu_or_gelu = 0  # which turns the fast path off
        slow = counted(lambda: layer(x)).result
    assert {row[0] for row in fast.by("type").rows()} != {row[0] for row in slow.by("type").rows()}
    assert fast.total("macs") == slow.total("macs")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_costs_nothing_on_the_fast_path_of_an_encoder() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1).eval()
    long, short = torch.rand(1, 6, 16), torch.rand(1, 3, 16)
    batch = torch.cat([long, nn.functional.pad(short, (0, 0, 0, 3))])
    padding = torch.tensor([[False] * 6, [False] * 3 + [True] * 3])
    with torch.no_grad():
        apart = macs(lambda: encoder(long)) + macs(lambda: encoder(short))
        assert macs(lambda: encoder(batch, src_key_padding_mask=padding)) == apart


@pytest.mark.parametrize("equation", ["ij,jk->ik", "bij,bjk->bik", "i,j->ij", "bhld,bhsd->bhls", "ij,jk"])
def test_einsum_costs_the_extents_of_all_its_letters(equation: str) -> None:
    sizes = {"i": 2, "j": 3, "k": 4, "b": 5, "h": 2, "l": 6, "d": 7, "s": 3}
    operands = [torch.rand([sizes[one] for one in term]) for term in equation.split("->")[0].split(",")]
    letters = {*equation} - {",", "-", ">"}
    expected = 1
    for letter in letters:
        expected *= sizes[letter]
    assert macs(lambda: torch.einsum(equation, *operands)) == expected


def test_a_recurrent_layer_costs_its_matrices_at_every_step() -> None:
    lstm = nn.LSTM(3, 5, num_layers=2)
    expected = 7 * 2 * (4 * 5 * (3 + 5) + 4 * 5 * (5 + 5))
    assert macs(lambda: lstm(torch.rand(7, 2, 3))) == expected


def test_it_agrees_with_the_counter_of_torch_on_a_training_step() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 10)
    )
    x = torch.rand(4, 3, 16, 16)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    result = counted(lambda: model(x).sum().backward()).result
    assert 2 * result.total("macs") == counter.get_total_flops()
    assert not result.unsupported


def test_every_execution_counts_and_shapes_are_told_apart() -> None:
    layer = nn.Linear(3, 7)

    def program() -> None:
        for batch in (2, 2, 5):
            layer(torch.rand(batch, 3))

    tool = counted(program)
    assert tool.result.total("macs") == (2 + 2 + 5) * 21
    tool.clear()
    assert tool.result.total("macs") == 0
    assert counted(program, tool).result.total("macs") == 9 * 21


def test_an_optimizer_is_a_phase_of_its_own() -> None:
    layer = nn.Linear(3, 7)
    optimizer = torch.optim.Adam(layer.parameters())

    def program() -> None:
        layer(torch.rand(2, 3)).sum().backward()
        optimizer.step()

    result = counted(program).result
    assert {row[0] for row in result.by("phase").rows()} == {"forward", "backward", "optimizer"}
    assert result.total("flops", "optimizer") >= 4 * sum(
        parameter.numel() for parameter in layer.parameters()
    )
    assert not result.unsupported


def test_modules_and_lines_are_told() -> None:
    model, x = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 2)), torch.rand(2, 3)
    result = counted(lambda: model(x)).result
    assert [row[:3] for row in result.by("module").rows()] == [("0", 1, 42), ("2", 1, 28), ("1", 1, 0)]
    (parameters,) = {row[-3] for row in result.by("module").rows() if row[0] == "0"}
    assert parameters == 3 * 7 + 7
    assert all(row[0].startswith(__file__) for row in result.by("source").rows())


def test_bytes_are_those_of_what_is_read_and_written() -> None:
    x = torch.rand(10, dtype=torch.float64)
    result = counted(lambda: x.view(2, 5) + 1).result
    assert result.total("bytes") == 2 * 10 * 8


def test_what_no_formula_knows_is_told_with_its_share() -> None:
    @torch.library.custom_op("flops_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return torch.from_numpy(2 * x.numpy())

    x = torch.rand(4, 4)
    result = counted(lambda: twice(x)).result
    assert result.unsupported == {"flops_tests::twice": 1}
    sentence = "No formula, or no shapes, for 33.3 % of the calls, which count as 0: flops_tests::twice (1)."
    assert sentence in str(result)


def test_a_formula_of_the_users_comes_first() -> None:
    def inverse(op: Shapes) -> Cost:
        (n, _) = op.out
        return Cost.of_macs(n**3)

    tool = counted(lambda: torch.linalg.inv(torch.rand(4, 4)), FlopsTool({"linalg_inv": inverse}))
    assert (tool.result.total("macs"), tool.result.total("flops")) == (64, 128)


def test_an_unknown_key_or_total_is_named() -> None:
    result = counted(lambda: torch.ones(1) + 1).result
    with pytest.raises(AmandaError, match="keys phase, type, module, source, not colour"):
        result.by("colour")
    with pytest.raises(AmandaError, match="not of 'watts'"):
        result.total("watts")


def test_it_is_loaded_by_name() -> None:
    assert isinstance(amanda.load_tool("flops"), FlopsTool)


def test_counting_changes_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)), torch.rand(2, 3)
    model(x).sum().backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    counted(lambda: model(x).sum().backward())
    assert all(
        torch.equal(gradient, parameter.grad)
        for gradient, parameter in zip(plain, model.parameters(), strict=True)
    )


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_kept_does_not_grow_with_executions(cached: bool) -> None:
    layer, tool = nn.Linear(3, 7), FlopsTool()
    sizes = []
    switch = amanda.cache_enabled if cached else amanda.cache_disabled
    with amanda.apply(tool), switch():
        for _ in range(4):
            for batch in (2, 5):
                layer(torch.rand(batch, 3)).sum().backward()
            sizes.append(len(tool._op_cost_by_key))
    assert sizes[0] == sizes[-1] < 30
    assert tool.result.total("macs", "forward") == 4 * 7 * 21
    assert tool.result.total("macs", "backward") == 4 * 7 * 21


def test_gradients_of_views_move_no_bytes() -> None:
    x = torch.ones(4, 8, requires_grad=True)
    with amanda.apply(tool := FlopsTool()):
        (x.t().unsqueeze(0).permute(2, 0, 1).view(32) * 2).sum().backward()
    moved = {op.type: op.bytes for op in tool.result.ops if op.phase == "backward"}
    views = {"transpose_backward", "unsqueeze_backward", "permute_backward", "view_backward"}
    assert {kind for kind, count in moved.items() if not count} >= views & moved.keys()
    assert moved["mul_backward"] > 0
    assert len(views & moved.keys()) >= 3


class Tied(nn.Module):
    """An embedding whose weight is that of the head, and attention whose two products are on one line."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.head.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        out: torch.Tensor = self.head(self.attention(x, x, x)[0])
        return out


def test_each_parameter_counts_once_in_whatever_ops_read_it() -> None:
    model, flops = Tied(), FlopsTool()
    with amanda.apply(flops):
        for length in (3, 5):
            model(torch.zeros(2, length, dtype=torch.long)).sum().backward()
    result = flops.result
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert result.tree().rows()[0][2] == elements
    (of_attention,) = {row[-3] for row in result.by("module").rows() if row[0] == "attention"}
    assert of_attention == sum(parameter.numel() for parameter in model.attention.parameters())
    assert {row.phase: row.parameters for row in result.merged(result).by("phase")} == {
        "forward": elements, "backward": 0,
    }  # fmt: skip


class Tokens(Tied):
    """Tied weights, a token that is put before the others, and a product with a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.weight = nn.Parameter(torch.rand(1, 8)), nn.Parameter(torch.rand(8, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token, self.embedding(tokens)]) @ self.weight.t()
        out: torch.Tensor = self.head(self.attention(x, x, x)[0])
        return out


@pytest.mark.slow
def test_parameters_of_a_compiled_graph_are_those_of_eager_code() -> None:
    torch.compiler.reset()
    model, counts = Tokens(), []
    x, y = torch.zeros(3, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    calls: list[Callable[[Tensor], Tensor]] = [model, torch.compile(model, backend="aot_eager")]
    for run in calls:
        flops = FlopsTool()
        with amanda.apply(flops, compiled="instrument"):
            for tokens in (x, y):
                run(tokens).sum().backward()
        counts.append({(row[0], row[2]) for row in flops.result.tree().rows()})
    assert counts[0] == counts[1]
    with amanda.apply(flops := FlopsTool(), compiled="instrument"):
        for run in calls:  # the same parameters
            run(x)
    assert flops.result.tree().rows()[0][2] == sum(parameter.numel() for parameter in model.parameters())


def test_parameters_stay_apart_in_a_file(tmp_path: Path) -> None:
    flops = FlopsTool()
    with amanda.apply(flops):
        Tied()(torch.zeros(2, 3, dtype=torch.long))
    flops.result.save(tmp_path / "flops.json")
    loaded = results.load(tmp_path / "flops.json")
    assert isinstance(loaded, FlopsResult)
    assert loaded.tree().rows() == flops.result.tree().rows()


def test_a_file_of_the_first_version_is_read() -> None:
    keys = {"phase": "forward", "type": "linear", "module": "a", "source": "a.py:1"}
    place = {**keys, "calls": 2, "macs": 6, "flops": 12, "parameters": 6, "bytes": 8, "estimate": 0}
    content = {"schema": "amanda.flops", "version": 1, "places": [place, {**place, "macs": 9}]}
    assert [row.parameters for row in FlopsResult.from_dict(content)] == [6]
