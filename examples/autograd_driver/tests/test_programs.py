"""What programs of autograd do that the conformance suite does not."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import checkpoint, grad, hessian, jacobian, tracer
from autograd.core import primitive_vjps
from autograd.extend import defvjp, primitive
from autograd.misc.optimizers import adam
from autograd.numpy import sin as imported_sin

import amanda
from amanda.drivers.autograd import mark_parameters
from amanda.errors import AmandaError
from amanda.testing import EqualCopies
from amanda.tools.prune import PruneTool

X = np.array([[2.0, 1.0], [1.0, 3.0]])


class Names(amanda.Tool):
    """The names of ops in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[str] = []
        self.backward: list[str] = []
        self.ids: dict[str, set[int]] = {}
        self.add_inst_for_op(self._analyze)
        self.add_inst_for_op(self._analyze_backward, backward=True)

    def _analyze(self, context: amanda.OpContext) -> None:
        name = context.get_op().__name__
        self.ids.setdefault(name, set()).add(context.get_op_id())
        context.insert_before_op(lambda *inputs: self.forward.append(name))

    def _analyze_backward(self, context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__
        context.insert_before_backward_op(lambda *gradients: self.backward.append(name))


def test_primitives_are_seen_wherever_a_program_has_them() -> None:
    table = {"exp": anp.exp}
    names = Names()

    def function(x: Any) -> Any:
        return (np.tanh(imported_sin(table["exp"](x))) @ x).sum()

    with amanda.apply(names):
        gradient = grad(function)(X)
    assert names.forward == ["exp", "sin", "tanh", "matmul", "sum"]
    assert names.backward == ["sum_vjp", "matmul_vjp", "tanh_vjp", "sin_vjp", "exp_vjp"]
    assert gradient.tobytes() == grad(function)(X).tobytes()


def test_arguments_are_those_of_the_signature() -> None:
    contexts: list[tuple[list[Any], dict[str, Any]]] = []
    tool = amanda.Tool()

    def analyze(context: amanda.OpContext) -> None:
        contexts.append((context.get_inputs(), context.get_attrs()))
        context.insert_before_op(lambda x: 2 * x, inputs=["a"])

    tool.add_inst_for_op(analyze)
    with amanda.apply(tool):
        total = anp.sum(keepdims=True, axis=0, a=X)
    assert total.tolist() == [[6.0, 8.0]]
    ((inputs, attributes),) = contexts
    assert inputs[1:] == [0, True]
    assert attributes == {"axis": 0, "keepdims": True}


def test_several_results_have_gradients() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: (
            context.insert_after_op(lambda values: 2 * values, outputs=[0])
            if context.get_op().__name__ == "eigh"
            else None
        )
    )

    def function(x: Any) -> Any:
        values, vectors = anp.linalg.eigh(x)
        return anp.sum(values**2) + anp.sum(vectors)

    with amanda.apply(tool):
        changed = grad(function)(X)
    # The gradient of the squares of doubled values is doubled, and goes straight through.
    of_values = grad(lambda x: anp.sum(anp.linalg.eigh(x)[0] ** 2))(X)
    np.testing.assert_allclose(changed - grad(function)(X), of_values)


@pytest.mark.parametrize(
    "tool", [Names(), EqualCopies(lambda value: np.copy(value) if hasattr(value, "shape") else value)]
)
def test_derivatives_of_derivatives_are_the_same_under_tools(tool: amanda.Tool) -> None:
    def function(x: Any) -> Any:
        return anp.sum(anp.tanh(anp.dot(x, x)) * x[0, 1])

    def program() -> tuple[Any, Any]:
        return hessian(function)(X), jacobian(lambda x: anp.concatenate([x, anp.exp(x)]))(X)

    bare = program()
    with amanda.apply(tool) as scope:
        seen = program()
    # Gradients of a value that is copied for several ops are summed in another order.
    for array, expected in zip(seen, bare, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-14 if isinstance(tool, EqualCopies) else 0)
    assert not list(scope.report), scope.report


def test_a_checkpoint_that_was_made_before_the_scope_runs_op_by_op() -> None:
    names, function = Names(), checkpoint(lambda x: anp.sin(anp.exp(x)))
    with amanda.apply(names):
        grad(lambda x: anp.sum(function(x)))(X)
    assert names.forward == ["exp", "sin", "exp", "sin", "sum"]
    assert names.backward == ["sum_vjp", "sin_vjp", "exp_vjp"]
    assert [len(ids) for ids in names.ids.values()] == [1, 1, 1]


def test_a_checkpoint_leaves_nothing_in_the_tables_of_autograd() -> None:
    function = checkpoint(anp.sin)
    with amanda.apply(Names()):
        sizes = []
        for _ in range(3):
            grad(lambda x: anp.sum(function(x)))(X)
            sizes.append((len(tracer.trace_primitives_map), len(primitive_vjps)))
    assert len(set(sizes)) == 1


def test_an_object_without_a_hash_is_differentiated() -> None:
    class Loss:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Any) -> Any:
            return anp.sum(anp.exp(x))

    names = Names()
    with amanda.apply(names):
        grad(Loss())(X)
    assert names.forward == ["exp", "sum"]


def test_a_primitive_that_is_made_in_a_scope_is_seen() -> None:
    names = Names()
    with amanda.apply(names):

        @primitive
        def cube(x: Any) -> Any:
            return x * x * x

        defvjp(cube, lambda ans, x: lambda g: 3 * x * x * g)
        grad(lambda x: cube(x).sum())(X)
    assert names.forward == ["cube", "sum"]
    assert cube(X).tolist() == (X**3).tolist()


def test_primitives_are_what_they_were_after_a_scope() -> None:
    primitives = list(tracer.trace_primitives_map.values())
    before = [(made.__code__, dict(vars(made))) for made in primitives]
    with amanda.apply(Names()):
        assert anp.exp.__code__ is not before[primitives.index(anp.exp)][0]
        anp.exp(X)
    assert [(made.__code__, dict(vars(made))) for made in primitives] == before


def test_parameters_are_the_same_ones_in_each_step_of_an_optimizer() -> None:
    names = Names()
    paths: set[str] = set()
    names.add_inst_for_op(
        lambda context: paths.update(
            slot.path for i in range(len(context.get_inputs())) if (slot := context.get_variable(i))
        )
    )

    def loss(parameters: Any, step: int) -> Any:
        x = X.copy()
        for layer in parameters["layers"]:
            x = anp.dot(x, layer["weight"])
        return anp.sum(x**2)

    initial = {"layers": [{"weight": X / 4}, {"weight": X / 2}]}
    with amanda.apply(names):
        trained = adam(grad(loss), initial, num_iters=4)
    assert len(names.ids["dot"]) == 2
    assert paths == {"layers.0.weight", "layers.1.weight"}
    assert trained["layers"][0]["weight"].tobytes() != initial["layers"][0]["weight"].tobytes()


def test_new_arrays_in_the_places_of_parameters_are_finalized() -> None:
    x, prune = X.copy(), PruneTool(sparsity=0.5)

    def loss(tree: Any, step: int) -> Any:
        return anp.sum(anp.dot(x, tree["only"]))

    with amanda.apply(prune):
        parameters = adam(grad(loss), {"only": X.copy()}, num_iters=2)
    prune.finalize(parameters)
    assert np.count_nonzero(parameters["only"]) == 2


def test_a_function_that_is_made_anew_in_each_step_has_the_same_parameters() -> None:
    names, prune = Names(), PruneTool(sparsity=0.5)
    x, parameters = X.copy(), {"kernel": X.copy()}
    with amanda.apply(names, prune):
        for step in range(3):
            gradient = grad(lambda tree, step=step: anp.sum(anp.dot(x, tree["kernel"])) * step)(parameters)
            parameters = {"kernel": parameters["kernel"] - 0.1 * gradient["kernel"]}
    assert len(names.ids["dot"]) == 1
    prune.finalize(parameters)
    assert np.count_nonzero(parameters["kernel"]) == 2


def test_several_functions_of_the_same_places_need_a_name() -> None:
    def first(tree: Any) -> Any:
        return anp.sum(tree["shared"])

    def second(tree: Any) -> Any:
        return anp.sum(tree["shared"])

    with amanda.apply(Names()):
        grad(first)({"shared": X.copy()})
        grad(second)({"shared": X.copy()})
    tree = {"shared": X.copy()}
    with pytest.raises(AmandaError, match=r"<code object first .*<code object second"):
        mark_parameters(tree)
    assert mark_parameters(tree, second) is tree


@pytest.mark.parametrize("size", [1, 3])
def test_a_gradient_by_index_is_dense_for_routines(size: int) -> None:
    gradients: list[Any] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_after_backward_op(lambda *found: gradients.extend(found)),
        backward=True,
    )
    with amanda.apply(tool):
        grad(lambda x: anp.sum(x[:size]))(np.ones(3))
    assert [gradient.tolist() for gradient in gradients if gradient is not None][-1] == [1.0] * size + [
        0.0
    ] * (3 - size)
