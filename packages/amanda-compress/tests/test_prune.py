"""Pruning on PyTorch: which weights, which masks, training, and what outlives a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import amanda
from amanda.tools.prune import PruneError, PruneTool, element_mask, n_m_mask
from amanda.tools.select import select


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.rand(6, 4, 8, 8, generator=generator), torch.randint(4, (6,), generator=generator))
        for _ in range(count)
    ]


X = batches(1)[0][0]


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [one.weight for one in model.modules() if isinstance(one, (nn.Conv2d, nn.Linear))]


def masks(tool: PruneTool) -> list[Tensor]:
    return [value for name, value in tool.state_dict().items() if name.endswith("/mask")]


def test_weights_are_read_and_gradients_are_given_through_the_mask() -> None:
    model, tool = network(), PruneTool(sparsity=0.75)
    values = [one.clone() for one in weights(model)]
    with amanda.apply(tool):
        model(X).square().sum().backward()
    by_hand = copy.deepcopy(model)
    for one, value in zip(weights(by_hand), values, strict=True):
        one.data = value * element_mask(value, 0.75)
        one.grad = None
    by_hand(X).square().sum().backward()
    for one, hand, value in zip(weights(model), weights(by_hand), values, strict=True):
        assert torch.equal(one, value)  # the parameter itself is as it was
        assert torch.equal(one.grad, hand.grad * element_mask(value, 0.75))
    assert [row[2] for row in tool.result.rows()] == ["0", "3", "5"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda it: torch.optim.SGD(it, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda it: torch.optim.Adam(it, 0.01, weight_decay=1e-2),
    "adamw": lambda it: torch.optim.AdamW(it, 0.01, amsgrad=True),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[int], None], steps: int = 12
) -> Any:
    losses = []
    for step, (x, y) in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        after(step)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_momentum_does_not_revive_what_is_dropped(name: str) -> None:
    """Dense for five steps, so that momentum is there; then the curve of masking weights after each step."""
    model = network()
    by_hand, tool = copy.deepcopy(model), PruneTool(sparsity=0.6, begin=5)
    with amanda.apply(tool):
        losses = train(model, OPTIMIZERS[name](model.parameters()), lambda step: None)
    found: list[Tensor] = []

    def project() -> None:
        for one, mask in zip(weights(by_hand), found, strict=True):
            one.data *= mask

    optimizer = OPTIMIZERS[name](by_hand.parameters())
    hand_losses = []
    for step, (x, y) in enumerate(batches(12)):
        if step == 5:
            found += [element_mask(one, 0.6) for one in weights(by_hand)]
        if found:
            project()
        optimizer.zero_grad()
        loss = F.cross_entropy(by_hand(x), y)
        loss.backward()
        for one, mask in zip(weights(by_hand), found, strict=False):
            assert one.grad is not None
            one.grad *= mask
        optimizer.step()
        hand_losses.append(loss.item())
    project()
    assert losses == hand_losses
    assert any((one * ~mask).any() for one, mask in zip(weights(model), masks(tool), strict=True))
    tool.finalize(model)
    for one, hand in zip(weights(model), weights(by_hand), strict=True):
        assert torch.equal(one, hand)


def test_a_closure_of_an_optimizer_trains_the_pruned_model() -> None:
    by_closure, by_loop, labels = network(), network(), batches(1)[0][1]
    for model, has_closure in (by_closure, True), (by_loop, False):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = F.cross_entropy(model(X), labels)
            value.backward()
            return value

        with amanda.apply(tool := PruneTool(sparsity=0.75)):
            for _ in range(2):
                if has_closure:
                    optimizer.step(loss)
                else:
                    loss()
                    optimizer.step()
        assert tool.result.sparsity == 0.75
        tool.finalize(model)
    for one, other in zip(by_closure.parameters(), by_loop.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_computes_without_the_tool_what_it_did_with_it() -> None:
    for options in ({}, {"pattern": "2:4"}, {"pattern": "structured", "sparsity": 0.3}, {"pattern": "tile"}):
        model, tool = network().eval(), PruneTool(**options)  # type: ignore[arg-type]
        with amanda.apply(tool):
            y = model(X)
        assert not torch.equal(model(X), y)
        result = tool.finalize(model)
        assert torch.equal(model(X), y)
        zeros = sum(int((one == 0).sum()) for one in weights(model))
        assert zeros == result.zeros > 0
        with amanda.apply(tool):
            assert torch.equal(model(X), y)


def test_the_schedule_goes_by_steps_and_never_back() -> None:
    model = network()
    tool = PruneTool(0.9, schedule="cubic", begin=2, end=8, frequency=3)
    seen: list[float] = []
    before: list[Tensor] = []

    def look(step: int) -> None:
        nonlocal before
        seen.append(round(tool.result.sparsity, 2))
        assert all((old | ~new).all() for old, new in zip(before, masks(tool), strict=False))
        before = [one.clone() for one in masks(tool)]

    with amanda.apply(tool):
        train(model, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), look)
    assert seen == [0, 0, 0, 0, 0, 0.79, 0.79, 0.79, *[0.9] * 4]


def test_a_global_budget_uses_the_weights_of_the_step_before() -> None:
    model, tool = network(), PruneTool(0.7, scope="global", begin=3)
    values: list[list[Tensor]] = []
    with amanda.apply(tool):
        train(
            model, torch.optim.SGD(model.parameters(), 0.5),
            lambda step: values.append([one.detach().clone() for one in weights(model)]), 4,
        )  # fmt: skip
    threshold = torch.cat([one.abs().flatten() for one in values[2]]).sort().values
    dropped = round(0.7 * len(threshold))
    for mask, value in zip(masks(tool), values[2], strict=True):
        assert torch.equal(mask, value.abs() >= threshold[dropped])


@pytest.mark.parametrize("regrow", ["gradient", "random", "importance"])
def test_what_comes_back_begins_at_nothing_and_the_sparsity_stays(regrow: Any) -> None:
    model = network()
    tool = PruneTool(0.8, regrow=regrow, frequency=3, end=9, regrow_fraction=0.4)
    history: list[list[Tensor]] = []
    read: list[Tensor] = []
    seen = amanda.Tool()

    def note(weight: Tensor) -> None:
        read.append(weight.clone())

    seen.add_inst_for_op(
        lambda context: (
            context.get_op_type() == "linear" and context.insert_before_op(note, inputs=["weight"])
        )
    )
    with amanda.apply(tool, seen):
        train(
            model, torch.optim.SGD(model.parameters(), 0.3),
            lambda step: history.append([one.clone() for one in masks(tool)]),
        )  # fmt: skip
    for kept in history:
        assert abs(sum(int(one.sum()) for one in kept) / 1376 - 0.2) < 0.01
    changes = [
        any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for one, other in pairwise(history)
    ]
    assert all(not changed for i, changed in enumerate(changes) if i + 1 not in (3, 6, 9))
    assert changes[2]
    if regrow != "importance":
        came = history[3][2] & ~history[2][2]
        assert came.any()
        assert not read[3][came].any()
        assert read[4][came].any()
    tool.finalize(model)
    assert torch.allclose(model[5].weight, [*tool.weights][2].transformed(tool, model[5].weight))


def test_gradients_decide_what_comes_back() -> None:
    model = nn.Linear(30, 1, bias=False)
    tool = PruneTool(0.5, regrow="gradient", frequency=1, regrow_fraction=0.2)
    x = torch.arange(30.0)[None] + 1  # the gradient of a weight is its number
    with amanda.apply(tool):
        for _ in range(12):
            model(x).sum().backward()
    assert masks(tool)[0][0, -3:].all()


class Tied(nn.Module):
    """An embedding whose weight the head has too, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(self.embedding(tokens))
        return self.head(self.layer(x.relu()))


def test_a_weight_is_one_however_many_ops_read_it() -> None:
    model, tokens = Tied(), torch.arange(6)[None]
    tool = PruneTool(0.5, scope="global")
    tool.prepare(model, tokens)
    assert [row[2] for row in tool.result.rows()] == ["layer"]
    assert tool.result.elements == 256
    with amanda.apply(tool):
        y = model(tokens)
        y.sum().backward()
    tool.finalize(model)
    assert torch.equal(model(tokens), y)
    assert (model.layer.weight.grad == 0).sum() >= 128


def test_views_of_one_parameter_are_weights_of_their_own() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True, bias=False).train()
    q, k = torch.rand(2, 5, 16), torch.rand(2, 3, 16)
    tool = PruneTool(pattern="2:4")
    with amanda.apply(tool):
        y = attention(q, k, k)[0]
    assert sum(row[6] for row in tool.result.rows()) == 4 * 16 * 16
    tool.finalize(attention)
    assert torch.equal(attention(q, k, k)[0], y)
    assert torch.equal(n_m_mask(attention.in_proj_weight) > 0, attention.in_proj_weight != 0)


def test_products_of_any_spelling_are_pruned_along_their_inputs() -> None:
    weight = nn.Parameter(torch.randn(8, 6))
    x = torch.rand(3, 8)
    for program in (
        lambda: x @ weight,
        lambda: torch.addmm(torch.zeros(6), x, weight),
        lambda: F.linear(x, weight.T),
    ):
        tool = PruneTool(pattern="2:4")
        with amanda.apply(tool):
            y = program()
        assert torch.allclose(y, x @ (weight * n_m_mask(weight.T).T))


def test_types_and_modules_say_which_weights_are_pruned() -> None:
    def met(**options: Any) -> list[str]:
        tool = PruneTool(**options)
        with amanda.apply(tool):
            network()(X)
        return [row[2] for row in tool.result.rows()]

    assert met(type="conv*") == ["0", "3"]
    assert met(type=["linear"]) == ["5"]
    assert met(module=["3", "5"]) == ["3", "5"]
    assert met(exclude="5") == ["0", "3"]
    tool = PruneTool(pattern="1:16")
    with amanda.apply(tool):
        network()(X)
    assert [row[2] for row in tool.result.rows()] == ["5"]
    assert "Skipped conv2d of 0: its 4 input channels are no multiple of 16." in str(tool.result)
    tool = PruneTool()
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with amanda.apply(tool), torch.no_grad():
        nn.LSTM(4, 4)(torch.rand(3, 2, 4))
        encoder(torch.rand(2, 5, 16))
    assert len(tool.result.left) == 2
    assert set(tool.result.left.values()) == {"it multiplies by several weights in one op"}
    tool = PruneTool()
    with amanda.apply(select(tool, module="0")):
        network()(X)
    assert len(tool.result.rows()) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"scope": "global", "begin": 2}, {"regrow": "gradient", "frequency": 2, "end": 20},
     {"pattern": "2:4", "permute": True}],
    ids=str,
)  # fmt: skip
def test_masks_and_steps_outlive_the_process(options: dict[str, Any], tmp_path: Any) -> None:
    def trained(model: nn.Module, tool: PruneTool, data: Any) -> None:
        with amanda.apply(tool):
            for x, y in data:
                loss = F.cross_entropy(model(x), y)
                for parameter, grad in zip(
                    model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
                ):
                    parameter.data -= 0.1 * grad

    data = batches(9)
    whole, tool = network(), PruneTool(0.6, **options)
    trained(whole, tool, data)
    first, begun = network(), PruneTool(0.6, **options)
    trained(first, begun, data[:4])
    torch.save((first.state_dict(), begun.state_dict()), tmp_path / "checkpoint.pt")
    weights_of, state = torch.load(tmp_path / "checkpoint.pt")
    second, again = network(), PruneTool(0.6, **options)
    second.load_state_dict(weights_of)
    again.load_state_dict(state)
    trained(second, again, data[4:])
    if options.get("regrow") != "gradient":  # what step 3 had gathered for step 4 is lost with it
        assert all(torch.equal(one, other) for one, other in zip(masks(tool), masks(again), strict=True))
        assert all(torch.equal(*pair) for pair in zip(whole.parameters(), second.parameters(), strict=True))
    assert again.state_dict()["step"] == 9 or not tool._options.schedule.repeats
    assert again.result.sparsity == pytest.approx(tool.result.sparsity)
    again.clear()
    assert again.state_dict() == {"step": 0}


def test_a_loaded_mask_is_used_and_one_of_another_shape_is_an_error() -> None:
    tool = PruneTool(0.5)
    tool.prepare(network(), X)
    state = tool.state_dict()
    again = PruneTool(0.5)
    again.load_state_dict(state)
    with amanda.apply(again):
        nn.Sequential(*[copy.deepcopy(one) for one in network()])(X)
    assert all(torch.equal(one, other) for one, other in zip(masks(tool), masks(again), strict=True))
    again.load_state_dict({"0/conv2d/mask": torch.ones(2, 2)})
    with pytest.raises(PruneError, match=r"\(2, 2\).*\(8, 4, 3, 3\)"), amanda.apply(again):
        network()(X)


def test_half_precision_and_autocast_are_pruned_alike() -> None:
    model, tool = network().bfloat16(), PruneTool(pattern="2:4")
    with amanda.apply(tool):
        model(X.bfloat16()).sum().backward()
    assert torch.equal(masks(tool)[2], n_m_mask(model[5].weight) > 0)
    assert all((one.grad[~mask] == 0).all() for one, mask in zip(weights(model), masks(tool), strict=True))
    model, tool = network(), PruneTool()
    with amanda.apply(tool), torch.autocast("cpu", torch.bfloat16):
        y = model.eval()(X)
    tool.finalize(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(X), y)


def test_weights_of_inference_are_weights_of_training() -> None:
    model, tool = network(), PruneTool(frequency=1, regrow="importance")
    with amanda.apply(tool):
        with torch.inference_mode():
            model(X)
        model(X).sum().backward()
    assert len(tool.result.rows()) == 3
    assert all((one.grad[~mask] == 0).all() for one, mask in zip(weights(model), masks(tool), strict=True))


def test_a_computed_weight_is_masked_but_cannot_be_finalized() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 4)))
    x, tool = torch.rand(2, 8), PruneTool(0.5)
    with amanda.apply(tool):
        y = model(x)
    dense = model[0].weight
    assert torch.equal(y, F.linear(x, dense * element_mask(dense), model[0].bias))
    with pytest.raises(PruneError, match=r"0 are computed at each call.*remove_parametrizations"):
        tool.finalize(model)


def test_masks_of_a_computed_weight_go_with_it_when_it_becomes_a_parameter() -> None:
    model, x = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 4)), nn.Linear(4, 4)), torch.rand(2, 8)
    with amanda.apply(tool := PruneTool(0.5)):
        model(x)
        model[0].parametrizations.weight.original1.data *= torch.rand(4, 8)  # another mask would be made now
        y = model(x)
    torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    tool.load_state_dict(tool.state_dict())
    tool.prepare(model, x)
    tool.finalize(model)
    assert torch.equal(model(x), y)


def test_what_a_parametrization_computes_a_weight_by_is_left() -> None:
    model, x = nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 4))).eval(), torch.rand(2, 8)
    dense = model[0].weight.detach()
    with amanda.apply(tool := PruneTool(0.5)):
        y = model(x)
    assert len(tool.result.rows()) == 1
    assert torch.equal(y, F.linear(x, dense * element_mask(dense, 0.5), model[0].bias))


def test_weights_in_a_grouped_product_are_told_to_be_left() -> None:
    x, weight = torch.rand(16, 16).bfloat16(), nn.Parameter(torch.rand(2, 16, 16).bfloat16())
    with amanda.apply(tool := PruneTool(0.5)):
        F.grouped_mm(x, weight, offs=torch.tensor([8, 16], dtype=torch.int32))
    assert "several weights" in str(tool.result.left)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pattern": "blocks"}, ["'blocks'", "2:4", "tile", "structured"]),
        ({"pattern": "5:4"}, ["5:4"]),
        ({"sparsity": "2:4"}, ["sparsity is '2:4'", "did you mean pattern='2:4'?"]),
        ({"scope": "layer"}, ["'layer'", "'global'"]),
        ({"sparsity": 1.5}, ["1.5"]),
        ({"pattern": "2:4", "scope": "global"}, ["2:4", "global"]),
        ({"permute": True}, ["permute", "unstructured"]),
        ({"regrow": "gradient"}, ["frequency"]),
        ({"regrow": "hope", "frequency": 2}, ["'hope'", "gradient"]),
        ({"regrow": "random", "frequency": 2, "pattern": "structured"}, ["random", "structured"]),
        ({"regrow": "random", "frequency": 2, "regrow_fraction": 2}, ["regrow_fraction is 2"]),
        ({"type": [3]}, ["type", "3"]),
        ({"norm": 3}, ["norm is 3"]),
    ],
)
def test_options_that_make_no_sense_are_said(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PruneError) as raised:
        PruneTool(**options)
    assert all(word in str(raised.value) for word in words)


def test_what_is_missing_is_said_when_it_is_needed() -> None:
    model, tool = network(), PruneTool(scope="global")
    with (
        pytest.raises(PruneError, match=r"tool.prepare\(model, example\).*begin=1") as raised,
        amanda.apply(tool),
    ):
        model(X)
    assert "PruneTool" in str(raised.value.__notes__)  # type: ignore[attr-defined]
    tool = PruneTool()
    with pytest.raises(PruneError, match="Nothing to finalize: PruneTool has changed no weight"):
        tool.finalize(model)
    tool.prepare(model, X)
    with pytest.raises(PruneError, match="none of the 3 weights"):
        tool.finalize(network())
    with pytest.raises(amanda.AmandaError, match="int has no parameters"):
        tool.finalize(3)
    tool.finalize(list(model.parameters()))
    assert sum(int((one == 0).sum()) for one in weights(model)) == 688


def test_the_result_is_a_table_and_a_file() -> None:
    tool = PruneTool(0.25, pattern="structured")
    tool.prepare(network(), X)
    found = tool.result.to_dict()
    assert (found["schema"], found["version"], found["tensors"]) == ("amanda.prune", 1, 3)
    row = found["rows"][1]
    assert (row["phase"], row["type"], row["module"]) == ("forward", "conv2d", "3")
    assert row["source"].startswith(__file__)
    assert (row["shape"], row["layout"], row["weights"], row["zeros"]) == ("8x8x3x3", "OIHW", 576, 144)
    assert (row["sparsity"], row["pattern"]) == (0.25, "structured")
    assert "Pruned 3 weights (1,376 elements), sparsity 0.2500." in str(tool.result)
    assert np.allclose(tool.result.to_pandas()["sparsity"], 0.25)


def test_gradients_of_gradients_are_those_of_the_pruned_weights() -> None:
    """What is kept of square weights has the gradient that it has once they are finalized."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
        torch.rand(3, 8, requires_grad=True),
    )

    def penalty() -> list[Tensor]:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.pow(2).sum(), [model[0].weight, model[2].weight]))

    tool = PruneTool(0.5)
    with amanda.apply(tool):
        found = penalty()
    tool.finalize(model)
    for gradient, wanted, layer in zip(found, penalty(), (model[0], model[2]), strict=True):
        assert torch.equal(gradient[layer.weight != 0], wanted[layer.weight != 0])
        assert gradient[layer.weight == 0].eq(0).all()
        assert wanted[layer.weight == 0].ne(0).any()


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv2d(4, 8, 3), torch.rand(2, 4, 5, 5)),
        (nn.Linear(6, 4), torch.rand(3, 6)),
        (Product(), torch.rand(3, 6)),
    ],
)
def test_gradients_are_masked_though_the_first_backward_pass_made_none_of_weights(
    layer: nn.Module, x: Tensor
) -> None:
    """A layer that is frozen at first, or an attack on the inputs."""
    x.requires_grad_()
    tool = PruneTool(0.5)
    with amanda.apply(tool):
        layer.requires_grad_(False)
        layer(x).sum().backward()
        layer.requires_grad_(True)
        torch.autograd.grad(layer(x).sum(), x)
        for _ in range(2):
            layer(x).sum().backward()
    tool.finalize(layer)
    weight: Any = layer.weight
    assert weight.grad[weight == 0].eq(0).all()
    assert weight.grad[weight != 0].ne(0).any()


class Experts(nn.Module):
    """Linear layers in parts of parameters; the input says which are called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 4)), nn.Parameter(torch.randn(4, 4, 8))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for i in chosen:
            x = F.linear(F.linear(x, self.up[i]), self.down[i])
        return x


BATCHES = [torch.tensor(one) for one in ([2, 0], [1], [0, 1, 2], [2, 1])]


@pytest.mark.parametrize("regrow", [None, "importance"])
def test_parts_of_a_parameter_have_masks_of_their_own_whichever_an_op_reads(regrow: Any) -> None:
    model, x = Experts(), torch.rand(3, 4)
    by_hand = copy.deepcopy(model)
    tool = PruneTool(sparsity=0.5, regrow=regrow, frequency=100 if regrow else None)
    for parameter in by_hand.parameters():
        for part in parameter.data[:3]:
            part *= element_mask(part, 0.5)
    wanted = [by_hand(x, chosen) for chosen in BATCHES]
    wanted[-1].sum().backward()
    with amanda.apply(tool):
        for chosen, y in zip(BATCHES, wanted, strict=True):
            model.zero_grad()
            found = model(x, chosen)
            found.sum().backward()
            assert torch.equal(found, y)
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad * (other != 0))
    assert len(tool.result.rows()) == 6
    tool.finalize(model)
    assert all(map(torch.equal, model.parameters(), by_hand.parameters()))


def test_masks_of_parts_are_found_again_whichever_are_read_first() -> None:
    model, x = Experts(), torch.rand(3, 4)
    first, again = PruneTool(sparsity=0.5), PruneTool(sparsity=0.5)
    with amanda.apply(first):
        for chosen in BATCHES:
            model(x, chosen)
    again.load_state_dict(first.state_dict())
    model.up.data[2, 0] *= 100
    model.down.data[1, 0] *= 100  # so that a mask made now would be another
    with amanda.apply(first):
        wanted = [model(x, chosen) for chosen in BATCHES]
    with amanda.apply(again):
        for i in (1, 3, 0, 2):
            assert torch.equal(model(x, BATCHES[i]), wanted[i])


class Listed(nn.Module):
    """Linear layers whose weights are in a list; the input says in which order they are called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(3))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for i in chosen:
            x = F.linear(x, self.weights[i])
        return x


def test_masks_of_parameters_in_a_list_go_by_the_parameter_whichever_is_read_first() -> None:
    x, first, again = torch.rand(3, 4), PruneTool(sparsity=0.5), PruneTool(sparsity=0.5)
    with amanda.apply(first):
        y = Listed()(x, [0, 1, 2])
    again.load_state_dict(first.state_dict())
    model = Listed()
    with amanda.apply(again):
        model(x, [2])
        model(x, [1])
        assert torch.equal(model(x, [0, 1, 2]), y)
    assert sorted(again.state_dict())[:4] == ["step", "weights.0/mask", "weights.0/updated", "weights.1/mask"]
    assert not again.result.waiting


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight).relu(), self.weight.t())


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "structured", "block", "tile"])
def test_a_parameter_and_its_transpose_are_one_weight(pattern: str) -> None:
    model, x, tool = AutoEncoder(), torch.rand(4, 16), PruneTool(sparsity=0.5, pattern=pattern)
    with amanda.apply(tool):
        y = model(x)
        y.sum().backward()
    (row,) = tool.result.to_dict()["rows"]
    tool.finalize(model)
    assert torch.equal(model(x), y)
    assert (model.weight == 0).float().mean() == row["sparsity"]
    assert model.weight.grad is not None
    assert not model.weight.grad[model.weight == 0].any()


def test_the_mask_of_a_parameter_is_found_whichever_form_is_read_first() -> None:
    class Decoder(AutoEncoder):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.weight.t()).relu(), self.weight)

    first, again = PruneTool(sparsity=0.5), PruneTool(sparsity=0.5)
    with amanda.apply(first):
        AutoEncoder()(torch.rand(4, 16))
    again.load_state_dict(first.state_dict())
    model = Decoder()
    model.weight.data *= torch.rand(8, 16)  # so that a mask made now would be another
    again.prepare(model, torch.rand(4, 8))
    again.finalize(model)
    (mask,) = masks(first)
    assert torch.equal(model.weight != 0, mask)
    assert torch.equal(masks(again)[0], mask)


def test_what_comes_back_counts_the_gradients_of_every_form() -> None:
    model, x = AutoEncoder(), torch.rand(4, 16)
    tool = PruneTool(sparsity=0.5, regrow="gradient", frequency=1, regrow_fraction=0.5)
    tool.prepare(model, x)
    kept = masks(tool)[0].bool()
    values = model.weight.detach() * kept
    dense = values.clone().requires_grad_()
    F.linear(F.linear(x, dense).relu(), dense.t()).square().sum().backward()
    with amanda.apply(tool):
        model(x).square().sum().backward()
        model(x)
    count = round(0.5 * 64)
    stay = torch.zeros(128).index_fill(0, values.abs().flatten().topk(64 - count).indices, 1).bool()
    assert dense.grad is not None
    grown = dense.grad.abs().flatten().masked_fill(stay, -1).topk(count).indices
    assert torch.equal(masks(tool)[0].bool().flatten(), stay.index_fill(0, grown, True))
    with amanda.apply(tool):
        y = model(x)
    tool.finalize(model)
    assert torch.equal(model(x), y)


def test_parts_and_the_whole_of_a_parameter_are_masked_alike() -> None:
    for whole_first in (True, False):
        torch.manual_seed(0)
        layer, x, other = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            torch.rand(2, 3, 8),
            torch.rand(2, 5, 8),
        )
        calls = [(x, x, x), (x, other, other)]
        tool = PruneTool(sparsity=0.5)
        with amanda.apply(tool):
            for one in calls if whole_first else calls[::-1]:
                layer(*one)
            made = [layer(*one)[0] for one in calls]
        tool.finalize(layer)
        assert all(torch.equal(layer(*one)[0], y) for one, y in zip(calls, made, strict=True))
        assert (layer.in_proj_weight == 0).float().mean() == 0.5


class EitherFirst(nn.Module):
    """An embedding and a product with one parameter, of which either may be called first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.other = nn.Linear(4, 4)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, tokens: Tensor, first: str) -> tuple[Tensor, Tensor]:
        if first == "embedding":
            found = self.embedding(tokens)
            return found, self.head(self.other(x))
        made = self.head(self.other(x))
        return self.embedding(tokens), made


@pytest.mark.parametrize("mode", ["eager", "instrument"])
def test_what_an_embedding_reads_too_is_left_whichever_is_called_first(mode: Any) -> None:
    x, tokens = torch.rand(2, 4), torch.tensor([1, 5])
    results = []
    for first in ("embedding", "product"):
        torch._dynamo.reset()
        model = EitherFirst()
        call = torch.compile(model, backend="aot_eager") if mode == "instrument" else model
        tool = PruneTool(sparsity=0.5)
        with amanda.apply(tool, compiled=mode):
            call(x, tokens, first)
            y = call(x, tokens, first)
            sum(one.sum() for one in y).backward()  # type: ignore[union-attr]
        assert tool.result.left == {"linear of head": "an embedding reads it too"}
        assert [row[2] for row in tool.result.rows()] == ["other"]
        assert sorted(tool.state_dict()) == ["other.weight/mask", "other.weight/updated", "step"]
        assert model.head.weight.grad is not None
        assert model.head.weight.grad.ne(0).all(0).any()
        tool.finalize(model)
        assert all(map(torch.equal, model(x, tokens, first), y))
        results += y
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


@pytest.mark.parametrize("form", ["weight.T", "weight"])
def test_what_an_embedding_reads_too_is_left_in_any_form(form: str) -> None:
    embedding, tool = nn.Embedding(8, 4), PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        x = embedding(torch.arange(8))
        y = x @ embedding.weight.T if form == "weight.T" else F.linear(x, embedding.weight)
    assert torch.equal(y, embedding.weight @ embedding.weight.T)
    assert "embedding" in str(tool.result.left)
    assert not tool.result.rows()


def test_what_selects_no_weight_is_told() -> None:
    model, tool = network(), PruneTool(module="encoder", type="conv2d")
    with amanda.apply(tool):
        model(X)
    told = "4 weights were met, of which type='conv2d', module='encoder' selects none"
    assert told in str(tool.result)
    with pytest.raises(PruneError, match=told):
        tool.finalize(model)


def test_masks_of_other_modules_are_told() -> None:
    model, first, again = network(), PruneTool(), PruneTool()
    with amanda.apply(first):
        nn.ModuleDict({"module": model})["module"](X)
    theirs = {f"module.{name}": value for name, value in first.state_dict().items()}
    again.load_state_dict(theirs)
    told = r"no 0\.weight/mask among .*module\.0\.weight"
    with amanda.apply(again), pytest.raises(amanda.AmandaError, match=told):
        model(X)
    again.load_state_dict(theirs, strict=False)
    with amanda.apply(again):
        model(X)
    assert len(again.result.waiting) == 3
    assert "3 of the masks that were loaded are of no op that was met, such as module." in str(again.result)
    assert not first.result.waiting


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sparsity": "0.5"}, ["sparsity", "'0.5'"]), ({"sparsity": None}, ["sparsity", "None"]),
        ({"begin": 1.5}, ["begin", "1.5"]), ({"frequency": 1.5}, ["frequency", "1.5"]),
        ({"begin": None}, ["begin", "None"]), ({"end": "9"}, ["end", "'9'"]),
        ({"seed": 0.5}, ["seed", "0.5"]),
        ({"type": 5}, ["type", "5", "list"]), ({"pattern": None}, ["pattern", "None"]),
        ({"regrow": "random", "frequency": 1, "regrow_fraction": "a"}, ["regrow_fraction", "'a'"]),
    ],
)  # fmt: skip
def test_options_of_another_kind_are_refused(options: Any, words: list[str]) -> None:
    with pytest.raises(PruneError) as error:
        PruneTool(**options)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "structured", "block", "tile"])
def test_weights_without_elements_are_left(pattern: str) -> None:
    tool = PruneTool(pattern=pattern)
    with amanda.apply(tool):
        for extents in (0, 4), (4, 0):
            F.linear(torch.rand(2, extents[1]), nn.Parameter(torch.empty(extents)))
    assert not tool.result.rows()
    assert set(tool.result.left.values()) == {"it has no elements"}
