"""Masks within function transforms of torch.func."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.func import functional_call, grad, stack_module_state, vmap  # noqa: E402

import amanda  # noqa: E402
from amanda.tools.dynamic_prune import (  # noqa: E402
    ActivationPruneTool,
    AttentionPruneTool,
    DynamicChannelPruneTool,
)
from amanda.tools.prune import PruneTool  # noqa: E402
from amanda.tools.quantize import QuantizeTool  # noqa: E402


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def pruned(net: Any) -> Any:
    """Return a copy of a network with the smaller half of each weight set to zero."""
    copy = network()
    for name, value in net.named_parameters():
        if name.endswith("weight"):
            lowest = value.abs().flatten().topk(value.numel() // 2, largest=False).indices
            with torch.no_grad():
                copy.get_parameter(name).view(-1)[lowest] = 0
    return copy


def test_a_mask_acts_under_vmap_and_grad() -> None:
    net, rows = network(), torch.rand(5, 8)

    def slopes(net: Any) -> Any:
        return vmap(grad(lambda x: net(x).sum()))(rows)

    expected, tool = pruned(net), PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        values, gradients = vmap(net)(rows), slopes(net)
    assert torch.equal(values, vmap(expected)(rows))
    assert torch.equal(gradients, slopes(expected))
    assert tool.result.zeros == 20


def test_a_mask_that_is_first_needed_within_grad_acts() -> None:
    net, x = network(), torch.rand(8)
    expected = grad(lambda x: pruned(net)(x).sum())(x)
    with amanda.apply(PruneTool(sparsity=0.5)):
        assert torch.equal(grad(lambda x: net(x).sum())(x), expected)


def test_a_mask_acts_on_parameters_that_are_handed_in() -> None:
    net, rows = network(), torch.rand(5, 8)
    parameters = {name: value.detach() for name, value in net.named_parameters()}
    with amanda.apply(PruneTool(sparsity=0.5)):
        result = functional_call(net, parameters, (rows,))
        batched = vmap(lambda x: functional_call(net, parameters, (x,)))(rows)
    assert torch.equal(result, pruned(net)(rows))
    torch.testing.assert_close(batched, result)


def masked(parameters: dict[str, Any], sparsity: float = 0.5) -> dict[str, Any]:
    """Return parameters with the smallest elements of each weight set to zero, as many as a share is."""

    def mask(value: Any) -> Any:
        lowest = value.abs().flatten().topk(round(value.numel() * sparsity), largest=False).indices
        return torch.ones(value.numel()).index_fill(0, lowest, 0).view_as(value)

    return {
        name: value * mask(value) if name.endswith("weight") else value for name, value in parameters.items()
    }


def ensemble_of(count: int) -> tuple[Any, dict[str, Any], list[dict[str, Any]]]:
    """Return a model without numbers, the stacked parameters of some models, and those of each model."""
    models = [network() for _ in range(count)]
    for number, model in enumerate(models):
        torch.manual_seed(number)
        torch.nn.init.normal_(model[0].weight)
        torch.nn.init.normal_(model[2].weight)
    stacked, _ = stack_module_state(models)
    return copy.deepcopy(models[0]).to("meta"), stacked, [detached(model) for model in models]


def detached(net: Any) -> dict[str, Any]:
    return {name: value.detach() for name, value in net.named_parameters()}


def square_loss(net: Any) -> Callable[[Any, Any], Any]:
    return lambda parameters, x: functional_call(net, parameters, (x,)).square().sum()


def test_each_model_of_an_ensemble_has_a_mask_of_its_own() -> None:
    (base, stacked, models), rows = ensemble_of(3), torch.rand(5, 8)

    def run(stacked: Any) -> Any:
        return vmap(lambda p: functional_call(base, p, (rows,)))(stacked)

    by_hand = [masked(parameters) for parameters in models]
    expected = run({name: torch.stack([model[name] for model in by_hand]) for name in stacked})
    tool = PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        result = run(stacked)
        result.square().sum().backward()
    assert torch.equal(result, expected)
    for name in ("0.weight", "2.weight"):
        for number, model in enumerate(by_hand):
            slope = grad(square_loss(base))(model, rows)[name]
            torch.testing.assert_close(stacked[name].grad[number], slope * (model[name] != 0))
    paths = [row[7] for row in tool.result.rows()]
    assert paths[:3] == ["0.weight[0]", "0.weight[1]", "0.weight[2]"]
    assert tool.result.zeros == 3 * 20
    assert not tool.result.left


def test_masks_of_an_ensemble_are_loaded_and_follow_their_schedule() -> None:
    (base, stacked, models), rows = ensemble_of(2), torch.rand(5, 8)
    tool = PruneTool(sparsity=0.75, schedule="linear", end=2)

    def step(tool: PruneTool) -> Any:
        with amanda.apply(tool):
            return vmap(vmap(lambda p, x: functional_call(base, p, (x,)), (None, 0)), (0, None))(
                stacked, rows
            )

    results = [step(tool) for _ in range(3)]
    by_hand = [masked(parameters, 0.75) for parameters in models]
    expected = torch.stack([functional_call(network(), model, (rows,)) for model in by_hand])
    torch.testing.assert_close(results[-1], expected)
    other = PruneTool(sparsity=0.75)
    other.load_state_dict(tool.state_dict())
    assert torch.equal(step(other), results[-1])


def test_gradients_over_parameters_are_those_of_masked_weights() -> None:
    net, rows = network(), torch.rand(5, 8)
    loss, parameters, by_hand = square_loss(net), detached(net), masked(detached(net))
    tool = PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        gradients = grad(loss)(parameters, rows)
        of_samples = vmap(grad(loss), (None, 0))(parameters, rows)
        of_module = grad(loss)(dict(net.named_parameters()), rows)
        result = net(rows)
    slopes, sample_slopes = grad(loss)(by_hand, rows), vmap(grad(loss), (None, 0))(by_hand, rows)
    for name, value in by_hand.items():
        kept = value != 0
        assert torch.equal(gradients[name], slopes[name] * kept)
        assert torch.equal(of_samples[name], sample_slopes[name] * kept)
        assert torch.equal(of_module[name], gradients[name])
    # One weight, whether the program hands it in or the module has it.
    assert torch.equal(result, pruned(net)(rows))
    assert [name for name in tool.state_dict() if name.endswith("mask")] == ["0.weight/mask", "2.weight/mask"]
    tool.finalize(net)
    assert torch.equal(net(rows), result)


def test_weights_that_each_task_adapts_have_the_masks_of_the_model() -> None:
    net, support, queries = network(), torch.rand(3, 5, 8), torch.rand(3, 5, 8)
    loss, parameters = square_loss(net), detached(net)

    def adapted_loss(parameters: Any, support: Any, queries: Any, masks: Any) -> Any:
        def masked_loss(parameters: Any, x: Any) -> Any:
            return loss({name: value * masks[name] for name, value in parameters.items()}, x)

        slopes = grad(masked_loss)(parameters, support)
        return masked_loss({name: parameters[name] - 0.1 * slopes[name] for name in parameters}, queries)

    def outer(parameters: Any, masks: Any) -> Any:
        tasks = vmap(adapted_loss, (None, 0, 0, None))(parameters, support, queries, masks)
        return tasks.sum()

    ones = {name: torch.ones_like(value) for name, value in parameters.items()}
    masks = {
        name: (value != 0).float() if name.endswith("weight") else ones[name]
        for name, value in masked(parameters).items()
    }
    expected, tool = grad(outer)(parameters, masks), PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        result = grad(outer)(parameters, ones)
    for name in parameters:
        torch.testing.assert_close(result[name], expected[name])
    assert len(tool.result.rows()) == 2


@pytest.mark.parametrize("options", [{"importance": "gradient"}, {"importance": "wanda"},
                                     {"regrow": "gradient", "frequency": 1}])  # fmt: skip
def test_importance_is_gathered_within_transforms(options: Any) -> None:
    net, rows = network(), torch.rand(5, 8)
    loss, parameters = square_loss(net), detached(net)
    masks = []
    for gradients in (vmap(grad(loss), (None, 0)), lambda p, x: grad(loss)(p, x)):
        tool = PruneTool(sparsity=0.5, begin=1, **options)
        with amanda.apply(tool):
            for _ in range(2):
                gradients(parameters, rows)
                tool.step()
        masks.append({name: value for name, value in tool.state_dict().items() if "mask" in name})
        assert not tool.result.left
    of_samples, of_batch = masks
    assert all(torch.equal(of_samples[name], of_batch[name]) for name in of_batch)
    assert not all(mask.all() for mask in of_batch.values())


def test_weights_that_cannot_be_followed_are_left_and_named() -> None:
    (base, stacked, _), rows = ensemble_of(2), torch.rand(5, 8)
    tool = PruneTool(sparsity=0.5, importance="gradient", begin=1)
    weights = torch.rand(2, 4, 8)

    def run() -> list[Any]:
        handed_in = vmap(lambda p: functional_call(base, p, (rows,)))(stacked)
        return [handed_in, vmap(lambda weight: torch.nn.functional.linear(rows, weight))(weights)]

    bare = run()
    with amanda.apply(tool):
        assert all(map(torch.equal, run(), bare))
    with amanda.apply(plain := PruneTool(sparsity=0.5)):
        assert torch.equal(run()[1], bare[1])
    assert "gradients and inputs are not followed to the samples of a vmap" in tool.result.left.values()
    assert "each sample of a vmap has its own, and no module holds it" in plain.result.left.values()


def quantized(method: str, run: Callable[[], Any], **options: Any) -> tuple[Any, QuantizeTool]:
    """Return the second result of a program in a scope of a tool, and the tool."""
    tool = QuantizeTool(method=method, calibration=1 if method == "static" else 0, **options)
    with amanda.apply(tool):
        run()
        return run(), tool


@pytest.mark.parametrize("method", ["static", "dynamic", "qat"])
def test_each_model_of_an_ensemble_has_scales_of_its_own(method: Any) -> None:
    (base, stacked, models), rows = ensemble_of(3), torch.rand(5, 8)

    def slopes(parameters: Any) -> Any:
        return grad(square_loss(base))(parameters, rows)

    def run() -> Any:
        return vmap(lambda p: (functional_call(base, p, (rows,)), slopes(p)))(stacked)

    (results, gradients), tool = quantized(method, run)
    for number, model in enumerate(models):
        net = network()
        net.load_state_dict(model)

        def step(net: Any = net) -> Any:
            net.zero_grad()
            result = net(rows)
            result.square().sum().backward()
            return result

        expected, _ = quantized(method, step)
        torch.testing.assert_close(results[number], expected)
        for name, value in net.named_parameters():
            torch.testing.assert_close(gradients[name][number], value.grad, rtol=1e-4, atol=1e-5)
    assert {"weight[0]", "weight[2]", "input 0[1]"} <= {row[4] for row in tool.result.rows()}


@pytest.mark.parametrize("method", ["static", "dynamic", "qat"])
def test_samples_share_the_scale_of_their_batch(method: Any) -> None:
    net, rows = network(), torch.rand(5, 8)
    expected, _ = quantized(method, lambda: net(rows), sqnr=True)
    result, tool = quantized(method, lambda: vmap(net)(rows), sqnr=True)
    torch.testing.assert_close(result, expected)
    assert not torch.equal(result, net(rows))
    assert len(tool.result.rows()) == 4


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_weights_that_each_task_adapts_have_the_scale_of_the_model(method: Any) -> None:
    net, support, queries = network(), torch.rand(3, 5, 8), torch.rand(3, 5, 8)
    loss, parameters = square_loss(net), detached(net)

    def adapted_loss(parameters: Any, support: Any, queries: Any) -> Any:
        slopes = grad(loss)(parameters, support)
        return loss({name: parameters[name] - 0.01 * slopes[name] for name in parameters}, queries)

    def run() -> Any:
        return grad(lambda p: vmap(adapted_loss, (None, 0, 0))(p, support, queries).sum())(parameters)

    result, tool = quantized(method, run, activation_bits=None)
    expected = run()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=0.02, atol=0.02)  # eight bits
        assert not torch.equal(result[name], value)
    assert [row[4] for row in tool.result.rows()] == ["weight", "weight"]


def test_learned_scales_leave_what_a_transform_wraps() -> None:
    (base, stacked, _), rows = ensemble_of(2), torch.rand(5, 8)

    def run() -> Any:
        return vmap(lambda p, x: functional_call(base, p, (x,)), (0, None))(stacked, rows)

    result, tool = quantized("lsq", run, activation_bits=None)
    assert torch.equal(result, run())
    assert "its scale is learned, and a transform such as vmap has wrapped the value" in str(tool.result)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of torch.jit, with which torch decomposes tangents
@pytest.mark.parametrize("method", ["dynamic", "qat", "lsq"])
def test_weights_are_quantised_that_are_first_read_within_a_transform(method: Any) -> None:
    net, x = network(), torch.rand(5, 8)
    tool = QuantizeTool(method=method, activation_bits=None)
    with amanda.apply(tool):
        _, derivative = torch.func.jvp(lambda x: net(x).sum(), (x,), (torch.ones_like(x),))
        result = net(x)
    assert not torch.equal(result, net(x))
    assert derivative.isfinite()


class Block(torch.nn.Module):
    """A residual branch of convolutions, and an attention over the rows of each channel."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
        self.norm, self.query, self.key = (
            torch.nn.BatchNorm2d(4),
            torch.nn.Linear(6, 6),
            torch.nn.Linear(6, 6),
        )
        self.fused = fused

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.second(torch.relu(self.first(x))))) + x
        query, key = self.query(x), self.key(x)
        if self.fused:
            return torch.nn.functional.scaled_dot_product_attention(query, key, x)
        return torch.softmax(query @ key.transpose(-1, -2), -1) @ x


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch computes it sample by sample
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [DynamicChannelPruneTool, ActivationPruneTool, AttentionPruneTool])
def test_dynamic_pruning_leaves_ops_within_transforms(make: Any, fused: bool) -> None:
    torch.manual_seed(0)
    net, x = Block(fused).eval(), torch.rand(3, 4, 6, 6)
    loss = square_loss(net)

    def run() -> list[Any]:
        of_samples = vmap(grad(loss), (None, 0))(detached(net), x[:, None])
        return [vmap(lambda x: net(x[None])[0])(x), grad(lambda x: net(x).sum())(x), *of_samples.values()]

    bare, tool = run(), make()
    with amanda.apply(tool):
        net(x)
        before = net(x)
        assert all(map(torch.equal, run(), bare))
        assert torch.equal(net(x), before)
    (note, *_) = [note for note in tool.result.notes() if "within transforms" in note]
    kind = "conv2d of first" if make is not AttentionPruneTool else "scaled_dot" if fused else "softmax"
    assert note.startswith(kind)
    assert note.endswith(
        "is left as it is within transforms: a transform such as vmap has wrapped its input."
    )


class Tied(torch.nn.Module):
    """A language model whose output layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8)
        self.output = torch.nn.Linear(8, 10, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Any) -> Any:
        return self.output(self.hidden(self.embedding(tokens)))


def test_a_tied_weight_that_is_handed_in_is_left_as_outside_of_transforms() -> None:
    torch.manual_seed(0)
    net, tokens, tool = Tied(), torch.arange(6), PruneTool(sparsity=0.5)
    with amanda.apply(tool):
        grad(square_loss(net))(detached(net), tokens)
    assert tool.result.left == {"linear of output": "an embedding reads it too"}
    assert [row[7] for row in tool.result.rows()] == ["hidden.weight"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch computes it sample by sample
@pytest.mark.parametrize("pattern", ["2:4", "structured", "unstructured"])
def test_weights_of_an_attention_are_pruned_in_each_model(pattern: str) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
    stacked, _ = stack_module_state(layers)
    x, tool = torch.rand(2, 5, 8), PruneTool(sparsity=0.5, pattern=pattern)
    with amanda.apply(tool):
        results = vmap(lambda parameters: functional_call(layers[0], parameters, (x,)))(stacked)
    for layer, result in zip(layers, results, strict=True):
        with amanda.apply(PruneTool(sparsity=0.5, pattern=pattern)):
            torch.testing.assert_close(layer(x), result)
    paths = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert [row[7] for row in tool.result.rows()] == [f"{path}[{i}]" for path in paths for i in range(2)]
