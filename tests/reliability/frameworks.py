"""The frameworks that are attacked: one network of two products with ReLU between them, in each.

Weights and inputs are small integers, so that every sum is exact in whatever order a framework computes it,
fused or not. So outputs and gradients of all frameworks are the same bits, with `Double` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda.tools.mapping import StandardMapping

AMANDA = str(Path(amanda.__file__).parent)
Array = NDArray[np.float32]
Step = Callable[[Array], list[Array]]

_RNG = np.random.default_rng(0)
X, FIRST, SECOND = (
    _RNG.integers(-4, 5, size=size).astype(np.float32) for size in ((8, 4, 16), (16, 16), (16, 8))
)
"""Eight inputs, and both weights."""


def expected(x: Array, factor: int = 1) -> list[Array]:
    """Return the outputs, the gradient of their sum by both weights, where ReLU's output has a factor."""
    hidden = x @ FIRST
    active = np.maximum(hidden, 0) * factor
    # A routine's value is isolated from autodiff: its gradient goes to the original unchanged.
    passed = (np.ones((len(x), SECOND.shape[1]), np.float32) @ SECOND.T) * (hidden > 0)
    return [active @ SECOND, x.T @ passed, active.T @ np.ones((len(x), SECOND.shape[1]), np.float32)]


class Double(amanda.Tool):
    """Doubles the output of ReLU; looks at all other ops."""

    def __init__(self) -> None:
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_backward, backward=True)

    def _analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(_look)
        if context["type"] == "relu":
            context.insert_after_op(_double, outputs=[0])

    def _analyse_backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(_look)


def _double(value: Any) -> Any:
    return value * 2


@amanda.observer
def _look(*_: Any) -> None:
    pass


def differs(values: list[Array], x: Array, factor: int = 1) -> bool:
    """Return True if some value of a step, its outputs or a gradient, is not the expected one."""
    right = expected(x, factor)
    return any(
        np.asarray(value).shape != wanted.shape or (np.asarray(value) != wanted).any()
        for value, wanted in zip(values, right, strict=False)
    )


class Outcome(NamedTuple):
    """The outcome of an attack on a framework.

    count: how many attempts, of a unit.  wrong: values that differ, exceptions that are others, files that
    cannot be read.  left: what is not as it was, by name.  note: other figures.
    """

    count: int
    unit: str
    wrong: int = 0
    left: Sequence[str] = ()
    note: str = ""


class Framework(NamedTuple):
    """A framework in one of its modes.

    start: imports it and returns a step, which gives the outputs of an input and, if the framework has
    gradients, those of their sum by both weights.  options: of `amanda.apply`.  keeps: whether the framework
    keeps what it compiled for a tool, also when the tool is gone.  without: attacks that end the process.
    raises_within: a folder; handlers of signals raise while functions of files in it are under way.
    """

    name: str
    package: str
    start: Callable[[], Step]
    options: dict[str, Any] = {}  # noqa: RUF012
    gradients: bool = True
    keeps: bool = False
    without: Sequence[str] = ()
    raises_within: str = ""

    def installed(self) -> bool:
        """Return True if the framework can be imported."""
        return find_spec(self.package.replace("-cpu", "")) is not None

    def version(self) -> str:
        """Return the version of its distribution."""
        return version(self.package)

    def scope(self, *tools: amanda.Tool) -> Any:
        """Return a scope with tools."""
        return amanda.apply(*tools, **self.options)


def _torch(compiled: bool) -> Step:
    import torch

    torch.set_num_threads(1)

    def network(x: Any, first: Any, second: Any) -> Any:
        return torch.relu(x @ first) @ second

    call = torch.compile(network, backend="aot_eager") if compiled else network

    def step(x: Array) -> list[Array]:
        weights = [torch.tensor(weight, requires_grad=True) for weight in (FIRST, SECOND)]
        y = call(torch.tensor(x), *weights)
        y.sum().backward()
        return [y.detach().numpy(), *(weight.grad.numpy() for weight in weights)]

    return step


def _tensorflow(function: bool) -> Step:
    import tensorflow as tf

    first, second = tf.Variable(FIRST), tf.Variable(SECOND)

    def network(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.nn.relu(x @ first) @ second
        return [y, *tape.gradient(y, [first, second])]

    call = tf.function(network) if function else network
    return lambda x: [value.numpy() for value in call(tf.constant(x))]


def _onnxruntime() -> Step:
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "second"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, size])
        for name, size in (("x", 16), ("y", 8))
    )
    weights = [numpy_helper.from_array(FIRST, "first"), numpy_helper.from_array(SECOND, "second")]
    graph = helper.make_graph(nodes, "network", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return lambda x: session.run(None, {"x": x})


def _jax() -> Step:
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any) -> Any:
        y = jax.nn.relu(x @ weights[0]) @ weights[1]
        return y.sum(), y

    call = jax.jit(jax.grad(loss, has_aux=True))

    def step(x: Array) -> list[Array]:
        gradients, y = call((jnp.asarray(FIRST), jnp.asarray(SECOND)), jnp.asarray(x))
        return [np.asarray(value) for value in (y, *gradients)]

    return step


def _mindspore() -> Step:
    import mindspore
    from mindspore import Parameter, Tensor, nn, ops

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)

    class Network(nn.Cell):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = Parameter(Tensor(FIRST), name="first")
            self.second = Parameter(Tensor(SECOND), name="second")

        def construct(self, x: Any) -> Any:
            y = ops.matmul(ops.relu(ops.matmul(x, self.first)), self.second)
            return y.sum(), y

    network = Network()
    call = mindspore.value_and_grad(network, None, network.trainable_params(), has_aux=True)

    def step(x: Array) -> list[Array]:
        (_, y), gradients = call(Tensor(x))
        return [value.asnumpy() for value in (y, *gradients)]

    return step


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("PyTorch", "torch", lambda: _torch(False)),
        Framework("PyTorch, compiled", "torch", lambda: _torch(True), {"compiled": "instrument"}, keeps=True),
        Framework("TensorFlow", "tensorflow-cpu", lambda: _tensorflow(False), raises_within=AMANDA),
        Framework("TensorFlow, function", "tensorflow-cpu", lambda: _tensorflow(True), raises_within=AMANDA),
        Framework("ONNX Runtime", "onnxruntime", _onnxruntime, gradients=False),
        Framework("JAX", "jax", _jax, keeps=True),
        Framework("MindSpore", "mindspore", _mindspore, without=("threads", "server", "signals")),
    )
}
