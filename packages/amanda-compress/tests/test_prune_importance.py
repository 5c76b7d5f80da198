"""Importance of weights, each against a reference written from its paper."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pipelined import let_torchvision_load
from torch import Tensor, nn

import amanda
from amanda.tools.prune import PruneError, PruneTool, block_mask, linear_sparsity


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(8, 8, (3, 2), groups=2, dilation=(1, 2)), nn.Tanh(), nn.Flatten(),
        nn.Linear(32, 12), nn.Tanh(), nn.Linear(12, 4),
    )  # fmt: skip


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.rand(6, 4, 8, 8, generator=generator), torch.randint(4, (6,), generator=generator))
        for _ in range(count)
    ]


def layers(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if isinstance(one, (nn.Conv2d, nn.Linear))]


def masks(tool: PruneTool) -> list[Tensor]:
    return [value for name, value in tool.state_dict().items() if name.endswith("/mask")]


def lowest_dropped(scores: Tensor, sparsity: float) -> Tensor:
    """Return what stays when the lowest round(sparsity * elements) scores go."""
    kept = torch.ones(scores.numel(), dtype=torch.bool)
    kept[scores.flatten().argsort()[: round(sparsity * scores.numel())]] = False
    return kept.reshape(scores.shape)


def prepared(tool: PruneTool, model: nn.Module, count: int = 2, backward: bool = False) -> None:
    with amanda.apply(tool), tool.calibrating():
        for x, y in batches(count):
            loss = F.cross_entropy(model(x), y)
            if backward:
                loss.backward()


@pytest.mark.parametrize("scope", ["local", "global"])
def test_gradient_is_the_change_of_the_loss_to_first_order(scope: Any) -> None:
    model, tool = network(), PruneTool(0.6, importance="gradient", scope=scope)
    prepared(tool, model, backward=True)
    saliency = [(one.weight * one.weight.grad).abs() for one in layers(model)]
    if scope == "global":
        whole = lowest_dropped(torch.cat([one.flatten() for one in saliency]), 0.6)
        parts = whole.split([one.numel() for one in saliency])
        expected = [part.reshape(one.shape) for part, one in zip(parts, saliency, strict=True)]
    else:
        expected = [lowest_dropped(one, 0.6) for one in saliency]
    for mask, other in zip(masks(tool), expected, strict=True):
        assert torch.equal(mask, other)


def test_movement_is_what_training_with_straight_through_scores_finds() -> None:
    """Sanh et al. 2020, eq. 1-3: scores learn by the gradient of the masked weight, dropped or not."""
    model = network()
    by_hand = copy.deepcopy(model)
    options: Any = {"schedule": "linear", "begin": 1, "end": 7, "frequency": 3, "initial_sparsity": 0.2}
    tool = PruneTool(0.8, importance="movement", regrow="importance", **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    with amanda.apply(tool):
        for x, y in batches(10):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    scores = [torch.zeros_like(one.weight) for one in layers(by_hand)]
    kept = [torch.ones_like(one.weight) for one in layers(by_hand)]
    for step, (x, y) in enumerate(batches(10)):
        if step in (1, 4, 7):
            sparsity = 0.2 + 0.6 * (step - 1) / 6
            kept = [lowest_dropped(one, sparsity).float() for one in scores]
        dense = [one.weight.detach().clone() for one in layers(by_hand)]
        for one, value, mask in zip(layers(by_hand), dense, kept, strict=True):
            one.weight.data = value * mask
        by_hand.zero_grad()
        F.cross_entropy(by_hand(x), y).backward()
        for i, one in enumerate(layers(by_hand)):
            scores[i] -= one.weight.grad * dense[i]
            one.weight.data = dense[i].add(one.weight.grad * kept[i], alpha=-0.2)
            one.bias.data.add_(one.bias.grad, alpha=-0.2)
    for mask, other in zip(masks(tool), kept, strict=True):
        assert torch.equal(mask.float(), other)
    assert tool.result.sparsity == pytest.approx(0.8, abs=0.01)
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def rows_read(layer: Any, x: Tensor) -> Tensor:
    """Return the inputs of a layer as rows: (groups, positions, columns of the weight's matrix)."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    found = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return found.reshape(len(x), layer.groups, -1, found.shape[-1]).permute(1, 0, 3, 2).flatten(1, 2)


def inputs_of(model: nn.Module, count: int = 2) -> list[Tensor]:
    """Return what each layer reads in the batches, as rows."""
    found: dict[int, list[Tensor]] = {}
    hooks = [
        layer.register_forward_hook(
            lambda module, given, _, i=i: found.setdefault(i, []).append(rows_read(module, given[0]))
        )
        for i, layer in enumerate(layers(model))
    ]
    with torch.no_grad():
        for x, _ in batches(count):
            model(x)
    for hook in hooks:
        hook.remove()
    return [torch.cat(found[i], 1) for i in range(len(hooks))]


def test_wanda_compares_each_outputs_weights_by_the_norm_of_their_inputs() -> None:
    """Sun et al. 2023, algorithm 1."""
    model, tool = network(), PruneTool(0.5, importance="wanda")
    prepared(tool, model)
    for mask, layer, rows in zip(masks(tool), layers(model), inputs_of(model), strict=True):
        norms = rows.norm(dim=1).repeat_interleave(layer.weight.shape[0] // len(rows), 0)
        metric = layer.weight.detach().flatten(1).abs() * norms
        expected = torch.stack([lowest_dropped(row, 0.5) for row in metric])
        assert torch.equal(mask.flatten(1), expected)


@pytest.mark.parametrize("importance", ["wanda", "sparsegpt"])
def test_importance_of_inputs_chooses_n_of_m(importance: Any) -> None:
    model, tool = network(), PruneTool(pattern="2:4", importance=importance)
    prepared(tool, model, 12)
    for mask in masks(tool):
        groups = mask.movedim(1, -1).reshape(-1, 4)
        assert (groups.sum(1) == 2).all()
    rows, weight = inputs_of(model, 12)[2][0], model[5].weight.detach()
    if importance == "wanda":
        best = (weight.abs() * rows.norm(dim=0)).reshape(-1, 4).topk(2).indices
        assert torch.equal(masks(tool)[2].reshape(-1, 4).nonzero()[:, 1].reshape(-1, 2), best.sort().values)
    else:
        kept, new = brain_surgeon(weight, rows, vectors=(2, 4))
        assert torch.equal(masks(tool)[2], kept)
        tool.finalize(model)
        assert torch.allclose(model[5].weight.double(), new, atol=1e-6)


def brain_surgeon(
    weight: Tensor, rows: Tensor, sparsity: float = 0.5, vectors: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Prune a matrix column by column by the inverse of what is left of the Hessian, inverted each time.

    Frantar & Alistarh 2023, eq. 3-5, with a fresh inverse at each column in place of a Cholesky factor.
    """
    new, hessian = weight.double().clone(), rows.double().T @ rows.double()
    unread = hessian.diagonal() == 0
    new[:, unread] = 0
    hessian += unread.double().diag()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    inverses = [torch.linalg.inv(hessian[j:, j:]) for j in range(len(hessian))]
    diagonal = torch.stack([one[0, 0] for one in inverses])
    kept = torch.ones_like(weight, dtype=torch.bool)
    for j, inverse in enumerate(inverses):
        if vectors is None and j % 128 == 0:
            end = j + 128
            kept[:, j:end] = lowest_dropped(new[:, j:end] ** 2 / diagonal[j:end], sparsity)
        elif vectors is not None and j % vectors[1] == 0:
            n, end = vectors[0], j + vectors[1]
            worst = (new[:, j:end] ** 2 / diagonal[j:end]).argsort(1)[:, : vectors[1] - n]
            kept[:, j:end] = kept[:, j:end].scatter(1, worst, False)
        error = torch.where(kept[:, j], 0.0, new[:, j]) / inverse[0, 0]
        new[:, j:] -= error[:, None] * inverse[0]
        new[:, j] = torch.where(kept[:, j], new[:, j], 0.0)
    return kept, new


def test_sparsegpt_makes_up_for_what_it_drops() -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 40) @ torch.randn(40, 160) + torch.randn(400, 160)  # which correlate
    x[:, 7] = 0
    layer = nn.Linear(160, 16)
    other = copy.deepcopy(layer)
    kept, new = brain_surgeon(layer.weight.detach(), x)
    tool = PruneTool(0.5, importance="sparsegpt")
    with torch.no_grad():
        exact = layer(x)
        tool.prepare(layer, x)
        with amanda.apply(tool):
            pruned = layer(x)
        tool.finalize(layer)
        assert torch.equal(layer(x), pruned)
        assert torch.equal(masks(tool)[0], kept)
        assert torch.allclose(layer.weight.double(), new, atol=1e-6)
        by_magnitude = PruneTool(0.5)
        by_magnitude.prepare(other, x)
        by_magnitude.finalize(other)
        assert (pruned - exact).norm() < 0.7 * (other(x) - exact).norm()


def test_what_sparsegpt_changes_goes_with_the_state() -> None:
    model, tool = network(), PruneTool(0.5, importance="sparsegpt")
    prepared(tool, model)
    again = PruneTool(0.5, importance="sparsegpt")
    again.load_state_dict(tool.state_dict())
    x = batches(1)[0][0]
    with amanda.apply(tool):
        expected = model(x)
    with amanda.apply(again):
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_state_of_before_finalize_fits_the_model_of_before_and_of_after(compiled: bool) -> None:
    model, tool = network(), PruneTool(0.5, importance="sparsegpt")
    prepared(tool, model)
    x, dense, state = batches(1)[0][0], copy.deepcopy(model), copy.deepcopy(tool.state_dict())
    assert all(state[name].any() for name in state if name.endswith("offset"))
    tool.finalize(model)
    expected = model(x)
    for one in (dense, model):
        torch._dynamo.reset()
        again = PruneTool(0.5, importance="sparsegpt")
        again.load_state_dict(state)
        call = torch.compile(one, backend="aot_eager") if compiled else one
        with amanda.apply(again, compiled="instrument"):
            assert torch.equal(call(x), expected)
        again.finalize(one)
        assert torch.equal(one(x), expected)


def test_state_of_before_finalize_leaves_weights_that_had_come_back() -> None:
    model, tool = network(), PruneTool(0.5, regrow="random", frequency=1, end=3, regrow_fraction=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amanda.apply(tool):
        for x, y in batches(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    state = copy.deepcopy(tool.state_dict())
    assert any(state[name].any() for name in state if name.endswith("offset"))
    tool.finalize(model)
    expected = model(batches(1)[0][0])
    again = PruneTool(0.5, regrow="random", frequency=1, end=3, regrow_fraction=0.3)
    again.load_state_dict(state)
    with amanda.apply(again):
        assert torch.equal(model(batches(1)[0][0]), expected)


@pytest.mark.parametrize("importance", ["gradient", "wanda", "sparsegpt"])
def test_compiled_graphs_are_met_as_eager_models_are(importance: Any) -> None:
    model, x = network(), batches(1)[0][0]
    compiled = torch.compile(model, backend="eager")
    eager, graph = (PruneTool(0.5, importance=importance) for _ in range(2))
    with eager.calibrating(), amanda.apply(eager):
        model(x).square().sum().backward()
    with amanda.apply(graph, compiled="instrument"), graph.calibrating():
        compiled(x).square().sum().backward()
    assert len(masks(eager)) == 4
    for mask, other in zip(masks(eager), masks(graph), strict=True):
        assert torch.equal(mask, other)
    with amanda.apply(eager):
        expected = model(x)
    with amanda.apply(graph, compiled="instrument"):
        assert torch.allclose(compiled(x), expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["unstructured", "2:4"])
def test_what_a_language_model_computes_changes_least_with_sparsegpt(pattern: str) -> None:
    let_torchvision_load()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **sizes)).eval()
    tokens, change = torch.randint(100, (4, 32)), {}
    with torch.no_grad():
        dense = model(tokens).logits
        for importance in ("magnitude", "wanda", "sparsegpt"):
            tool = PruneTool(0.5, pattern, importance=importance, exclude="lm_head")
            tool.prepare(model, tokens)
            with amanda.apply(tool):
                change[importance] = float((model(tokens).logits - dense).norm())
            assert len(tool.result.rows()) == 14
            assert not tool.result.left
            assert tool.result.sparsity == 0.5
    assert change["sparsegpt"] < change["wanda"] < change["magnitude"]


def test_random_is_of_the_seed_the_weight_and_the_step() -> None:
    for seed in 0, 5:
        tool = PruneTool(0.3, importance="random", seed=seed)
        tool.prepare(network(), batches(1)[0][0])
        for number, mask in enumerate(masks(tool)):
            numbers = np.random.Generator(np.random.Philox([seed, number, 0, 1]))
            assert torch.equal(
                mask, lowest_dropped(torch.tensor(numbers.random(mask.shape, np.float32)), 0.3)
            )


def test_a_linear_schedule_goes_up_evenly() -> None:
    assert [linear_sparsity(step, 2, 6, 0.2, 0.8) for step in (0, 2, 3, 6, 9)] == pytest.approx(
        [0.2, 0.2, 0.35, 0.8, 0.8]
    )
    model, seen = network(), []
    tool = PruneTool(0.8, schedule="linear", begin=1, end=5, frequency=2)
    with torch.no_grad(), amanda.apply(tool):
        for x, _ in batches(7):
            model(x)
            seen.append(round(tool.result.sparsity, 1))
    assert seen == [0, 0, 0, 0.4, 0.4, 0.8, 0.8]


@pytest.mark.parametrize("norm", [1, 2])
def test_a_mask_of_blocks_drops_those_of_the_smallest_norm(norm: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 12)
    norms = {
        (i, j): weight[i : i + 4, j : j + 2].norm(norm).item() for i in (0, 4) for j in range(0, 12, 2)
    }  # fmt: skip
    expected = torch.ones(8, 12)
    for i, j in sorted(norms, key=lambda place: norms[place])[:7]:
        expected[i : i + 4, j : j + 2] = 0
    assert torch.equal(block_mask(weight, 7 / 12, (4, 2), norm), expected)
    assert np.array_equal(block_mask(weight.numpy(), 7 / 12, (4, 2), norm), expected.numpy())
    tool = PruneTool(7 / 12, "block", block=(4, 2), norm=norm)
    layer = nn.Linear(12, 8)
    layer.weight.data = weight
    tool.prepare(layer, torch.rand(2, 12))
    assert torch.equal(masks(tool)[0].float(), expected)
    odd = PruneTool(pattern="block", block=(3, 2))
    odd.prepare(layer, torch.rand(2, 12))
    (reason,) = odd.result.left.values()
    assert "8x12 has no whole number of blocks (3, 2)" in reason


def test_what_is_not_met_is_told() -> None:
    model, x = network(), batches(1)[0][0]
    tool = PruneTool(importance="gradient")
    with pytest.raises(PruneError, match="importance='gradient' is computed of gradients: run a backward"):
        tool.prepare(model, x)
    with (
        pytest.raises(PruneError, match=r"inputs of ops.*begin=1"),
        amanda.apply(PruneTool(importance="wanda")),
    ):
        model(x)
    branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tool = PruneTool(importance="gradient")
    with tool.calibrating(), amanda.apply(tool):
        results = [branch(torch.rand(2, 4)) for branch in branches]
        results[0].sum().backward()
    assert "linear of" in str(tool.result.left)
    assert [int(one.sum()) for one in masks(tool)] == [8, 16]
    transposed = nn.Sequential(nn.ConvTranspose2d(4, 8, 2), nn.Conv2d(8, 4, 1))
    tool = PruneTool(importance="wanda")
    tool.prepare(transposed, x)
    assert "conv_transpose2d multiplies" in str(tool.result.left)
    assert tool.result.zeros == 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"importance": "size"}, ["importance is 'size'", "magnitude"]),
        ({"importance": "movement", "pattern": "structured"}, ["movement", "sign", "structured"]),
        ({"importance": "sparsegpt", "pattern": "block"}, ["sparsegpt", "block"]),
        ({"importance": "sparsegpt", "frequency": 2}, ["sparsegpt", "frequency"]),
        ({"block": (4, 0)}, ["block is (4, 0)"]), ({"block": 4}, ["block is 4"]),
        ({"schedule": "linear"}, ["linear", "end"]),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PruneError) as raised:
        PruneTool(**options)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_calibration_between_steps_leaves_the_schedule_where_it_was(by_hand: bool, fails: bool) -> None:
    model, tool = nn.Linear(4, 4), PruneTool(1.0, schedule="linear", end=8)

    def train(steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(1, 4))
            if by_hand:
                tool.step()

    with amanda.apply(tool):
        train(4)
        assert tool.state_dict()["step"] == 4
        with pytest.raises(KeyError) if fails else nullcontext(), tool.calibrating():
            model(torch.ones(2, 4))
            model(torch.ones(2, 4))
            if fails:
                raise KeyError
        assert tool.state_dict()["step"] == 4
        assert tool.result.sparsity == 0.5
        train(2)
        assert tool.state_dict()["step"] == 6
        assert tool.result.sparsity == 0.625
