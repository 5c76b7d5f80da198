"""Tools on one network in JAX, eager and under jit, and in PyTorch: they tell the same of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amanda
from amanda.errors import AmandaError
from amanda.tools.diff import diff
from amanda.tools.dump import DumpTool
from amanda.tools.effective_path import EffectivePathTool
from amanda.tools.flops import FlopsTool
from amanda.tools.inject import InjectTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeError, QuantizeTool
from amanda.tools.stats import StatsTool

pytestmark = pytest.mark.usefixtures("attached_driver")

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(4, 8, 8, 2)).astype(np.float32)
CLASSES = np.array([0, 1, 2, 0])
WEIGHTS = {
    "conv.kernel": RNG.normal(size=(3, 3, 2, 4)).astype(np.float32) / 4,
    "conv.bias": RNG.normal(size=4).astype(np.float32),
    "linear.kernel": RNG.normal(size=(64, 3)).astype(np.float32) / 8,
    "linear.bias": RNG.normal(size=3).astype(np.float32),
}


class Network(nnx.Module):
    """A convolution, ReLU, a pooling and a layer of three classes."""

    def __init__(self) -> None:
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(64, 3, rngs=nnx.Rngs(0))
        for path, value in WEIGHTS.items():
            module, name = path.split(".")
            getattr(getattr(self, module), name).set_value(jnp.asarray(value))

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.conv(x)), (2, 2), (2, 2))
        return self.linear(x.reshape(len(x), -1))


def twin() -> Any:
    """Return the network in PyTorch, with the same weights."""

    class Twin(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.Linear(64, 3)
            kernel, matrix = WEIGHTS["conv.kernel"], WEIGHTS["linear.kernel"]
            self.conv.weight.data = torch.tensor(kernel.transpose(3, 2, 0, 1))
            self.linear.weight.data = torch.tensor(matrix.T)
            for name, layer in (("conv", self.conv), ("linear", self.linear)):
                layer.bias.data = torch.tensor(WEIGHTS[f"{name}.bias"])

        def forward(self, x: Any) -> Any:
            x = torch.nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
            return self.linear(x.permute(0, 2, 3, 1).flatten(1))

    return Twin()


def loss_of(model: Any, x: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), CLASSES).mean()


def steps(*tools: amanda.Tool, jit: bool = True, count: int = 3) -> tuple[list[float], Network]:
    """Return the losses of some steps of gradient descent, and the network."""
    model = Network()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, gradients = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, gradients)
        return value

    compiled: Callable[..., Any] = nnx.jit(step) if jit else step
    with amanda.apply(*tools) as scope:
        losses = [float(compiled(model, optimizer, jnp.asarray(IMAGES))) for _ in range(count)]
    assert not list(scope.report)
    return losses, model


def steps_of_torch(*tools: amanda.Tool, count: int = 3) -> tuple[list[float], Any]:
    """Return the losses of the same steps in PyTorch, and the network."""
    model = twin()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with amanda.apply(*tools):
        for _ in range(count):
            optimizer.zero_grad()
            logits = model(torch.tensor(IMAGES.transpose(0, 3, 1, 2)))
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(CLASSES))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


def assert_weights_agree(model: Network, reference: Any) -> None:
    kernel, matrix = reference.conv.weight.detach().numpy(), reference.linear.weight.detach().numpy()
    assert np.allclose(model.conv.kernel[...], kernel.transpose(2, 3, 1, 0), atol=1e-5)
    assert np.allclose(model.linear.kernel[...], matrix.T, atol=1e-5)
    assert np.allclose(model.conv.bias[...], reference.conv.bias.detach().numpy(), atol=1e-5)


MODES = pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])


@MODES
def test_macs_are_equal(jit: bool) -> None:
    tool, torch_tool = FlopsTool(), FlopsTool()
    steps(tool, jit=jit)
    steps_of_torch(torch_tool)

    def macs(tool: FlopsTool) -> dict[str, int]:
        macs_by_type: dict[str, int] = {}
        for place in tool.result.ops:
            if place.type in ("conv2d", "linear"):
                macs_by_type[place.type] = macs_by_type.get(place.type, 0) + place.calls * (place.macs or 0)
        return macs_by_type

    assert macs(tool) == macs(torch_tool) == {"conv2d": 3 * 4 * 64 * 4 * 18, "linear": 3 * 4 * 64 * 3}


@MODES
@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "structured"])
def test_masked_training_and_finalized_weights_agree(pattern: str, jit: bool) -> None:
    tool, torch_tool = PruneTool(0.5, pattern=pattern), PruneTool(0.5, pattern=pattern)
    losses, model = steps(tool, jit=jit)
    expected, reference = steps_of_torch(torch_tool)
    assert np.allclose(losses, expected, rtol=1e-5)
    assert_weights_agree(model, reference)
    with amanda.apply(tool):
        masked = model(IMAGES)
    assert tool.finalize(model).model is model
    torch_tool.finalize(reference)
    assert np.allclose(model(IMAGES), masked, atol=1e-5)  # the order of sums is XLA's
    assert_weights_agree(model, reference)
    assert (np.asarray(model.linear.kernel[...]) == 0).mean() >= 0.25


@MODES
@pytest.mark.parametrize("importance", ["gradient", "movement", "wanda", "sparsegpt", "random"])
def test_importance_of_what_a_step_has_met_agrees(importance: Any, jit: bool) -> None:
    tool, torch_tool = (PruneTool(0.5, importance=importance, begin=1) for _ in range(2))
    losses, model = steps(tool, jit=jit)
    expected, reference = steps_of_torch(torch_tool)
    assert np.allclose(losses, expected, rtol=1e-5)
    assert_weights_agree(model, reference)
    assert tool.result.sparsity == torch_tool.result.sparsity == 0.5


@MODES
@pytest.mark.parametrize(
    "options", [{"method": "qat", "activation_bits": 4}, {"method": "static", "calibration": 1}]
)
def test_quantised_training_agrees(options: dict[str, Any], jit: bool) -> None:
    tool, torch_tool = QuantizeTool(**options), QuantizeTool(**options)
    losses, model = steps(tool, jit=jit)
    expected, reference = steps_of_torch(torch_tool)
    assert np.allclose(losses, expected, rtol=1e-4)
    if options["method"] == "qat":  # scales that are fixed cut the gradient off in PyTorch
        assert_weights_agree(model, reference)
    scales = [
        {(row[1], row[4]): row[8] for row in trained_tool.result.rows()}
        for trained_tool in (tool, torch_tool)
    ]
    assert len(scales[0]) == 4
    for key, scale in scales[0].items():
        assert np.allclose(scale, scales[1][key], rtol=1e-4), key


def test_learned_scales_are_an_error() -> None:
    with pytest.raises(QuantizeError, match=r'conv2d of conv is of jax.*let it be "qat"'):
        steps(QuantizeTool("lsq"))


@MODES
def test_statistics_agree(jit: bool) -> None:
    numbers = []
    for run in (lambda tool: steps(tool, jit=jit), steps_of_torch):
        tool = StatsTool()
        run(tool)
        rows = [row for row in tool.result.rows() if row[1] == "relu" and "output 0" in row]
        numbers.append([cell for cell in rows[0] if isinstance(cell, float)])
    assert numbers[0]
    assert np.allclose(numbers[0], numbers[1], rtol=1e-4, atol=1e-5)


PARTS: tuple[Any, ...] = ("neurons", "synapses", "weights")


@MODES
def test_effective_paths_agree(jit: bool) -> None:
    tool, torch_tool = EffectivePathTool(0.5), EffectivePathTool(0.5)
    model = Network()
    run: Callable[..., Any] = nnx.jit(lambda model, x: model(x)) if jit else lambda model, x: model(x)
    with amanda.apply(tool):
        run(model, jnp.asarray(IMAGES))
    with amanda.apply(torch_tool), torch.no_grad():
        twin()(torch.tensor(IMAGES.transpose(0, 3, 1, 2)))
    for path, reference in zip(tool.paths(), torch_tool.paths(), strict=True):
        assert path.layers.keys() == reference.layers.keys()
        for name, layer in path.layers.items():
            expected = reference.layers[name]
            assert layer.sizes == expected.sizes
            assert all(len(layer.part(part)) == len(expected.part(part)) for part in PARTS)


def test_the_op_that_differs_from_torch_is_the_planted_one(tmp_path: Path) -> None:
    def dumped(name: str, run: Callable[..., Any]) -> Path:
        tool = DumpTool(tmp_path / name, outputs="full", weights="full", gradients="full")
        run(tool)
        assert tool.result.entries
        return tmp_path / name

    reference = dumped("torch", lambda tool: steps_of_torch(tool, count=1))
    same = dumped("jax", lambda tool: steps(tool, count=1))
    mapping = {"conv": "conv", "linear": "linear"}
    assert diff(reference, same, mapping=mapping).first is None

    def changed(tool: amanda.Tool) -> None:
        bug = amanda.Tool()
        bug.add_inst_for_op(
            lambda context: context.insert_before_op(lambda weight: weight * 1.01, inputs=[1])
            if context.get_op_type() == "dot_general" else None
        )  # fmt: skip
        with amanda.apply(bug):
            steps(tool, count=1)

    first = diff(reference, dumped("bug", changed), mapping=mapping).first
    assert first is not None
    assert "linear" in str(first)


@MODES
def test_a_fault_is_where_and_what_the_result_says(jit: bool) -> None:
    inputs: list[Any] = []
    inject = InjectTool(type="conv2d", seed=3)
    watch = amanda.Tool()

    def look(context: amanda.OpContext) -> None:
        if context.get_op_type() == "relu":
            context.insert_before_op(lambda x: inputs.append(np.array(x)))

    watch.add_inst_for_op(look)
    model = Network()
    run: Callable[..., Any] = nnx.jit(lambda model, x: model(x)) if jit else lambda model, x: model(x)
    with amanda.apply(watch):
        run(model, jnp.asarray(IMAGES))
    with amanda.apply(inject, watch):
        run(model, jnp.asarray(IMAGES))
    (row,) = inject.result.rows()
    fault = dict(zip([column.name for column in inject.result.columns], row, strict=True))
    bias = WEIGHTS["conv.bias"]
    (place,) = map(tuple, np.argwhere(inputs[0] != inputs[1]))
    assert fault["element"] == place or str(fault["element"]) == " ".join(map(str, place))
    for before, value in zip(inputs, (fault["old"], fault["new"]), strict=True):
        assert np.isclose(before[place], value + bias[place[-1]], rtol=1e-5)


def test_a_pytree_is_returned_anew() -> None:
    tool = PruneTool(0.5)
    params = {"first": {"kernel": jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)}, "scale": jnp.ones(3)}

    @jax.jit
    def program(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["first"]["kernel"])

    x = jnp.ones((2, 8))
    with amanda.apply(tool):
        masked = program(params, x)
    pruned = tool.finalize(params).model
    assert np.allclose(program(pruned, x), masked, atol=1e-6)
    assert (np.asarray(params["first"]["kernel"]) != 0).all()
    assert (np.asarray(pruned["first"]["kernel"]) == 0).mean() == 0.5
    assert tool.finalize({"params": params}).model["params"]["scale"].shape == (3,)


@MODES
def test_two_models_of_one_class_have_masks_of_their_own(jit: bool) -> None:
    teacher, student = Network(), Network()
    student.linear.kernel.set_value(jnp.asarray(WEIGHTS["linear.kernel"][::-1]))

    def both(teacher: Any, student: Any, x: Any) -> Any:
        return teacher(x), student(x)

    run: Callable[..., Any] = nnx.jit(both) if jit else both
    tool, x = PruneTool(0.5, type="linear"), jnp.asarray(IMAGES)
    with amanda.apply(tool):
        masked = run(teacher, student, x)
    for model in (teacher, student):
        kernel = np.array(model.linear.kernel[...])
        mask = np.abs(kernel).reshape(-1) > np.sort(np.abs(kernel).reshape(-1))[kernel.size // 2 - 1]
        model.linear.kernel.set_value(jnp.asarray(kernel * mask.reshape(kernel.shape)))
    with pytest.raises(AmandaError, match="let each model have a tool of its own"):
        tool.finalize(teacher)
    assert all(
        np.allclose(output, expected, atol=1e-5)
        for output, expected in zip(masked, both(teacher, student, x), strict=True)
    )


def test_ops_are_analysed_again_when_a_scope_is_entered_again() -> None:
    tool, analysed = amanda.Tool(), []
    tool.add_inst_for_op(lambda context: analysed.append(context.get_op_type()))
    program, x = jax.jit(lambda x: jnp.tanh(x)), jnp.ones(3)
    with amanda.apply(tool):
        program(x)
        program(x)
    assert analysed.count("tanh") == 1
    tool.analyse_again()
    with amanda.apply(tool):
        program(x)
    assert analysed.count("tanh") == 2
