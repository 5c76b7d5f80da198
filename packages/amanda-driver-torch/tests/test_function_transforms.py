"""Function transforms of torch.func: ops inside are ops, with the values of the level that calls them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import groupby, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)

import amanda
from amanda import interceptor
from amanda.errors import MutationError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")

Function = Callable[[Tensor], Tensor]

X = torch.tensor([0.3, -1.2, 0.7])
ROWS = torch.tensor([[0.3, -1.2, 0.7], [1.5, 0.2, -0.4]])
WEIGHT = torch.tensor([[0.2, -0.5, 1.0], [0.7, 0.1, -0.3], [-0.6, 0.4, 0.9]])


class Cube(torch.autograd.Function):
    """x ** 3, with a rule for every transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * tangent


def composed(x: Tensor) -> Tensor:
    return torch.tanh(WEIGHT @ x) * x.sin()


def in_place(x: Tensor) -> Tensor:
    y = x.sin()
    y.mul_(2).exp_()
    return y * x


def view_written(x: Tensor) -> Tensor:
    y = x.clone()
    part = y.view(-1)[1:]
    part.mul_(x[1:])
    y[0] = x[1] * 2
    return y * y.cos()


def function(x: Tensor) -> Tensor:
    result: Tensor = Cube.apply(x.sin())  # type: ignore[no-untyped-call]
    return result


def partly_recorded(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x * 2
    return torch.cat([scale[:1] * x[:1], x[1:].detach() * x[1:]])


FUNCTIONS: list[Function] = [composed, in_place, view_written, function, partly_recorded]


class Reading(nn.Module):
    """A module that computes with its weight alone."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.function = function

    def forward(self) -> Tensor:
        return self.function(self.weight)


def _with_weight(module: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = functional_call(module, {"weight": x}, ())
    return result


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, 2 * x])).sum(0),
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "grad_and_value": lambda f: lambda x: sum(grad_and_value(lambda x: f(x).sum())(x)),  # type: ignore[arg-type, return-value]
    "vjp": lambda f: lambda x: vjp(f, x)[1](x)[0],  # type: ignore[no-any-return]
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,))[1],  # type: ignore[no-any-return]
    "jacrev": lambda f: lambda x: jacrev(f)(x).sum(0),
    "jacfwd": lambda f: lambda x: jacfwd(f)(x).sum(0),
    "hessian": lambda f: lambda x: hessian(lambda x: f(x).sum())(x).sum(0),
    "functional_call": lambda f: partial(_with_weight, Reading(f)),
}
PAIRS = list(product(TRANSFORMS, repeat=2))


def nothing(*values: Any) -> None:
    """Look at every value."""


def unchanged(*values: Any) -> Any:
    """Hand every value back."""
    return values


def cloned(*values: Any) -> Any:
    """Hand back an equal new tensor for each."""
    return [
        [item.clone() for item in value] if isinstance(value, (list, tuple)) and _are_tensors(value)
        else value.clone() if isinstance(value, Tensor) else value
        for value in values
    ]  # fmt: skip


def _are_tensors(values: Any) -> bool:
    return all(isinstance(item, Tensor) for item in values)


class Everywhere(amanda.Tool):
    """One routine at every point of every op, and the ops that run, each with module and id."""

    def __init__(self, routine: Callable[..., Any] = nothing) -> None:
        self.routine = routine
        self.forward: list[tuple[str, str, int]] = []
        self.backward: list[tuple[str, str, int]] = []
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_backward, backward=True)

    def _analyse(self, context: amanda.OpContext) -> None:
        op = context.get_op_type(), context.get_scope(), context.get_op_id()
        context.insert_before_op(lambda: self.forward.append(op), inputs=[])
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)

    def _analyse_backward(self, context: amanda.OpContext) -> None:
        op = context.get_backward_op().__name__, context.get_forward_op_type(), context.get_backward_op_id()
        context.insert_before_backward_op(lambda: self.backward.append(op), grad_outputs=[])
        context.insert_before_backward_op(self.routine)
        context.insert_after_backward_op(self.routine)


class At(amanda.Tool):
    """Routines at the ops of one type."""

    def __init__(self, op_type: str, **routines: Callable[..., Any]) -> None:
        self.op_type, self.routines = op_type, routines
        self.add_inst_for_op(self._analyse)
        self.add_inst_for_op(self._analyse_backward, backward=True)

    def _analyse(self, context: amanda.OpContext) -> None:
        self._insert(context, {"before": context.insert_before_op, "after": context.insert_after_op,
                               "replace": context.replace_op})  # fmt: skip

    def _analyse_backward(self, context: amanda.OpContext) -> None:
        self._insert(context, {"before_backward": context.insert_before_backward_op,
                               "after_backward": context.insert_after_backward_op,
                               "replace_backward": context.replace_backward_op})  # fmt: skip

    def _insert(self, context: amanda.OpContext, points: dict[str, Callable[..., None]]) -> None:
        if context.get_forward_op_type() == self.op_type:
            for name in self.routines.keys() & points.keys():
                points[name](self.routines[name])


def assert_transparent(
    program: Callable[[], Tensor], routine: Callable[..., Any], tolerance: float = 0
) -> None:
    """Check that a routine at every point changes nothing, and that each call has the same ops."""
    bare, tool = program(), Everywhere(routine)
    with amanda.apply(tool):
        for _ in range(2):
            torch.testing.assert_close(program(), bare, rtol=tolerance, atol=tolerance)
    for ops in (tool.forward, tool.backward):
        assert [op[:2] for op in ops[: len(ops) // 2]] == [op[:2] for op in ops[len(ops) // 2 :]]
    assert tool.forward


@pytest.mark.parametrize("routine", [nothing, unchanged, cloned])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_tool_that_changes_nothing_leaves_every_bit(name: str, routine: Callable[..., Any]) -> None:
    for f in FUNCTIONS if routine is cloned else FUNCTIONS[:1]:
        transformed = TRANSFORMS[name](f)
        assert_transparent(lambda transformed=transformed: transformed(X), routine)  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize(
    "f",
    [composed, *(pytest.param(function, marks=pytest.mark.long) for function in FUNCTIONS[1:])],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("routine", [nothing, cloned])
def test_a_tool_that_changes_nothing_leaves_pairs_of_transforms(
    f: Function, routine: Callable[..., Any]
) -> None:
    # Edges to new values change the order in which autograd adds three gradients of a gradient.
    tolerance = 2e-6 if routine is cloned else 0
    for outer, inner in PAIRS:
        transformed = TRANSFORMS[outer](TRANSFORMS[inner](f))
        assert_transparent(lambda transformed=transformed: transformed(X), routine, tolerance)  # type: ignore[misc]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


OPS = [("linear", "0"), ("tanh", "1"), ("linear", "2")]


def test_an_op_under_a_transform_is_the_op_that_it_is_without(network: nn.Module) -> None:
    tool = Everywhere()
    with amanda.apply(tool), torch.no_grad():
        network(X)
        vmap(network)(ROWS)
        jvp(network, (X,), (X,))
    without, batched = tool.forward[:3], tool.forward[3:6]
    assert [op[:2] for op in without] == OPS
    assert batched == without
    assert [op for op in tool.forward[6:] if op[1]] == without


def test_ids_are_the_same_in_each_call() -> None:
    tool, per_sample = Everywhere(), vmap(grad(lambda x: composed(x).sum()))
    with amanda.apply(tool):
        for _ in range(3):
            per_sample(ROWS)
    for ops in (tool.forward, tool.backward):
        assert ops == 3 * ops[: len(ops) // 3]


def test_routines_get_the_values_of_the_level(network: nn.Module) -> None:
    shapes: list[Any] = []
    tool = At("tanh", before=lambda x: shapes.append(tuple(x.shape)))
    with amanda.apply(tool):
        network(ROWS)
        vmap(network)(ROWS)
        vmap(network, chunk_size=1)(ROWS)
        vmap(vmap(network))(ROWS[None])
    assert shapes == [(2, 4), *3 * [(4,)], (4,)]


def test_backward_ops_of_grad_have_their_forward_op(network: nn.Module) -> None:
    parameters = {name: value.detach() for name, value in network.named_parameters()}

    def loss(parameters: Any, x: Tensor) -> Any:
        return functional_call(network, parameters, (x,)).sum()

    tool, per_sample = Everywhere(), Everywhere()
    with amanda.apply(tool):
        grad(loss)(parameters, X)
    with amanda.apply(per_sample):
        vmap(grad(loss), in_dims=(None, 0))(parameters, ROWS)
    for seen in (tool, per_sample):
        assert [op for op, _ in groupby(op for _, op, _ in seen.backward)] == [
            "sum",
            "linear",
            "tanh",
            "linear",
        ]
    nodes = [(node, op) for node, op, _ in tool.backward]
    assert nodes[0] == ("SumBackward0", "sum")
    assert ("TanhBackward0", "tanh") in nodes


def test_nested_gradients_have_backward_ops_of_backward_ops() -> None:
    tool = Everywhere()
    with amanda.apply(tool):
        for _ in range(2):
            grad(lambda x: grad(lambda y: y.sin())(x))(torch.tensor(1.0))
    nodes = [node for node, op, _ in tool.backward if op == "sin"]
    once = ["SinBackward0", "MulBackward0", "CosBackward0"]
    assert sorted(nodes) == sorted(2 * once)
    assert len({number for _, op, number in tool.backward if op == "sin"}) == 3


@pytest.mark.skipif(not interceptor.NATIVE, reason="native code alone runs ops without Python")
def test_native_code_runs_ops_without_work_until_another_layer_needs_a_gradient() -> None:
    executed: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__
        context.insert_before_backward_op(lambda: executed.append(name), grad_outputs=[])

    def in_python() -> int:
        return sum(interceptor.statistics()["python"].values())

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, backward=True)
    with amanda.apply(tool):
        counts = []
        for _ in range(4):
            vmap(torch.sin)(ROWS)
            jvp(torch.sin, (ROWS,), (ROWS,))
            counts.append(in_python())
        assert counts[0] < counts[1] == counts[2] == counts[3]
        assert executed == []
        for times in (1, 2):
            vmap(grad(lambda x: x.sin().sum()))(ROWS)
            assert executed.count("SinBackward0") == times
        vmap(torch.sin)(ROWS.clone().requires_grad_()).sum().backward()
    assert executed.count("SinBackward0") == 3


@pytest.mark.skipif(not interceptor.NATIVE, reason="native code alone runs ops without Python")
def test_a_tool_without_actions_runs_no_op_of_a_gradient_in_python() -> None:
    tool, gradient = amanda.Tool(), vmap(grad(lambda x: composed(x).sum()))
    tool.add_inst_for_op(nothing, backward=True)
    counts = []
    with amanda.apply(tool):
        for _ in range(5):
            gradient(ROWS)
            counts.append(sum(interceptor.statistics()["python"].values()))
    assert counts[2] == counts[3] == counts[4]


def test_ordinary_gradients_pass_through_what_ran_under_vmap() -> None:
    x, tool = ROWS.clone().requires_grad_(), Everywhere()
    with amanda.apply(tool):
        vmap(torch.sin)(x).sum().backward()
    assert "SinBackward0" in [node for node, op, _ in tool.backward if op == "sin"]
    assert torch.equal(x.grad, ROWS.cos())


def test_a_changed_value_is_used_and_its_gradient_goes_straight_through() -> None:
    tool = At("sin", before=lambda x: 2 * x)
    with amanda.apply(tool):
        values = vmap(torch.sin)(ROWS)
        slopes = vmap(grad(lambda x: x.sin().sum()))(ROWS)
        curvature = hessian(lambda x: x.sin().sum())(X)
        third = grad(grad(grad(torch.sin)))(X[0])
        tangent = jvp(torch.sin, (X,), (torch.ones(3),))[1]
    torch.testing.assert_close(values, (2 * ROWS).sin(), rtol=0, atol=0)
    torch.testing.assert_close(slopes, (2 * ROWS).cos(), rtol=0, atol=0)
    torch.testing.assert_close(curvature, torch.diag(-(2 * X).sin()), rtol=0, atol=0)
    torch.testing.assert_close(third, -(2 * X[0]).cos(), rtol=0, atol=0)
    torch.testing.assert_close(tangent, (2 * X).cos(), rtol=0, atol=0)


def test_a_differentiable_routine_is_differentiated_at_every_level() -> None:
    tool = At("sin", before=amanda.differentiable(lambda x: 2 * x))
    with amanda.apply(tool):
        curvature = hessian(lambda x: x.sin().sum())(X)
    torch.testing.assert_close(curvature, torch.diag(-4 * (2 * X).sin()))


def test_a_changed_result_of_an_op_in_place_is_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 1
        y.sin_()
        return y

    with amanda.apply(At("sin_", after=lambda y: y + 1)):
        assert torch.equal(vmap(program)(ROWS), ROWS.sin() + 1)
        assert torch.equal(grad(lambda x: program(x).sum())(X), X.cos())


def test_a_changed_view_and_its_base_see_each_other_written() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 1
        part = y[1:]
        part.mul_(x[1:])
        return y

    with amanda.apply(At("getitem", after=lambda part: part + 1)):
        values = vmap(program)(ROWS)
        slopes = grad(lambda x: program(x).sum())(X)
    assert torch.equal(values, torch.cat([ROWS[:, :1], (ROWS[:, 1:] + 1) * (ROWS[:, 1:] + 1)], 1))
    assert torch.equal(slopes, torch.cat([torch.ones(1), 2 * (X[1:] + 1)]))


def test_a_replacement_takes_part_in_every_transform() -> None:
    with amanda.apply(At("sin", replace=lambda x: x**3)):
        assert torch.equal(vmap(torch.sin)(ROWS), ROWS**3)
        torch.testing.assert_close(hessian(lambda x: x.sin().sum())(X), torch.diag(6 * X))


def test_gradients_of_each_sample_can_be_changed_and_replaced() -> None:
    per_sample = vmap(grad(lambda x: x.sin().sum()))
    with amanda.apply(At("sin", after_backward=lambda gradient: gradient / gradient.norm())):
        clipped = per_sample(ROWS)
    torch.testing.assert_close(clipped.norm(dim=1), torch.ones(2))
    with amanda.apply(At("sin", replace_backward=lambda gradient: 5 * gradient)):
        assert torch.equal(per_sample(ROWS), torch.full((2, 3), 5.0))


def test_an_execution_hands_values_from_forward_to_backward() -> None:
    class Scaled(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.forward)
            self.add_inst_for_op(self.backward, backward=True)

        def forward(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "sin":
                context.insert_before_op(self.keep)

        def backward(self, context: amanda.OpContext) -> None:
            if context.get_forward_op_type() == "sin":
                context.insert_before_backward_op(self.scale)

        def keep(self, x: Tensor, *, run: dict[str, Any]) -> None:
            run["x"] = x

        def scale(self, gradient: Tensor, *, run: dict[str, Any]) -> Tensor:
            return gradient * run["x"]

    with amanda.apply(Scaled()):
        scaled = vmap(grad(lambda x: x.sin().sum()))(ROWS)
    assert torch.equal(scaled, ROWS * ROWS.cos())


def number(x: Tensor) -> None:
    x.item()


def branch(x: Tensor) -> Tensor | None:
    return None if x > 0 else x


@pytest.mark.parametrize("routine", [number, branch, lambda x: x.numpy() and None])
def test_a_number_of_a_batched_value_is_an_error_with_the_remedy(routine: Callable[..., Any]) -> None:
    with (
        pytest.raises(RuntimeError) as caught,
        amanda.apply(At("sin", before=routine)),
    ):
        vmap(torch.sin)(X)
    notes = "\n".join(caught.value.__notes__)
    assert "torch.func.debug_unwrap" in notes
    assert "tool At" in notes
    assert torch.equal(vmap(torch.sin)(X), X.sin())


def test_a_routine_that_looks_can_read_all_samples() -> None:
    totals: list[float] = []
    with amanda.apply(At("sin", before=lambda x: totals.append(torch.func.debug_unwrap(x).sum().item()))):
        vmap(torch.sin)(X)
        vmap(grad(torch.sin))(X)
    assert totals == 2 * [X.sum().item()]


def write(x: Tensor) -> None:
    x.add_(1)


@pytest.mark.parametrize("program", [lambda: vmap(torch.sin)(X.clone()), lambda: grad(torch.sin)(X[0])])
def test_a_routine_may_not_write_into_its_values(program: Callable[[], Any]) -> None:
    with pytest.raises(MutationError), amanda.apply(At("sin", before=write)):
        program()


def test_a_value_that_is_no_batch_takes_the_place_of_one() -> None:
    def program(x: Tensor) -> Tensor:
        y = x.sin()
        return y.add_(x)

    with amanda.apply(At("sin", after=lambda y: torch.zeros(3))):
        assert torch.equal(vmap(program)(ROWS), ROWS)


def test_random_ops_draw_the_same_numbers() -> None:
    def program() -> Tensor:
        torch.manual_seed(3)
        return vmap(lambda x: nn.functional.dropout(x) + torch.rand(3), randomness="different")(ROWS)

    bare = program()
    with amanda.apply(Everywhere(cloned)):
        assert torch.equal(program(), bare)


def test_weights_can_be_read_at_analysis(network: nn.Module) -> None:
    weights: list[Tensor] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            weights.append(context.get_value(1))

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        vmap(network)(ROWS)
    assert torch.equal(weights[0], network[0].weight)  # type: ignore[index]


def test_functions_of_autograd_are_seen_once_by_their_name() -> None:
    tool = Everywhere()
    with amanda.apply(tool):
        function(X)
        vmap(function)(ROWS)
        grad(lambda x: function(x).sum())(X)
        vmap(grad(lambda x: function(x).sum()))(ROWS)
    assert [op for op, *_ in tool.forward].count("Cube") == 4


def test_samples_and_tangents_are_told_by_the_shapes() -> None:
    samples: list[int] = []
    shapes_seen: list[Any] = []
    tool = amanda.Tool()

    @amanda.observer
    def record(*, shapes: Any) -> None:
        shapes_seen.append(shapes[0][0])

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "sin":
            samples.append(context.get_samples())
            context.insert_after_op(record, outputs=[])

    tool.add_inst_for_op(analyse, guard="read")
    with amanda.apply(tool):
        torch.sin(X)
        vmap(torch.sin)(ROWS)
        jvp(torch.sin, (X,), (X,))
        jacfwd(torch.sin)(X)
    assert samples == [1, 2, 1, 1]
    assert [tuple(shape) for shape in shapes_seen] == [(3,), (3,), (3,), (3,)]
    # The directions of `jacfwd` are a batch of the tangent alone.
    assert [getattr(shape, "tangents", ()) for shape in shapes_seen] == [
        (), (), (((1,), ()),), (((2,), ((1, 3),)),),
    ]  # fmt: skip
    assert len(set(shapes_seen)) == 4


FUNCTIONALIZED: dict[str, Callable[[Function], Function]] = {
    "alone": functionalize,
    "without views": lambda f: functionalize(f, remove="mutations_and_views"),
    "of grad": lambda f: functionalize(grad(lambda x: f(x).sum())),
    "of vmap": lambda f: lambda x: functionalize(vmap(f))(torch.stack([x, 2 * x])),
    "under vmap": lambda f: lambda x: vmap(functionalize(f))(torch.stack([x, 2 * x])),
    "of jvp": lambda f: functionalize(lambda x: jvp(f, (x,), (x,))[1]),
    "of hessian": lambda f: functionalize(hessian(lambda x: f(x).sum())),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("act", [nothing, unchanged, cloned])
@pytest.mark.parametrize("function", [composed, in_place, view_written, partly_recorded])
@pytest.mark.parametrize("name", FUNCTIONALIZED)
def test_ops_under_functionalize_are_seen_and_leave_all_bits(
    name: str, function: Function, act: Callable[..., Any]
) -> None:
    if (name, function) == ("under vmap", view_written):
        return  # torch raises an error
    program, tool, x = FUNCTIONALIZED[name](function), Everywhere(act), X.clone()
    bare = program(x)
    with amanda.apply(tool) as scope:
        assert torch.equal(program(x), bare)
    assert torch.equal(x, X)
    assert {"sin", "mul"} & {op for op, *_ in tool.forward}
    assert not [entry for entry in scope.report if "run as they are" in entry.reason]


FUNCTIONALIZED_WITHIN: dict[str, Callable[[Function], Function]] = FUNCTIONALIZED | {
    "under grad": lambda f: grad(lambda x: functionalize(f)(x).sum()),
    "under jvp": lambda f: lambda x: jvp(functionalize(f), (x,), (x,))[1],
    "under hessian": lambda f: hessian(lambda x: functionalize(f)(x).sum()),
    "of vmap of grad": lambda f: (
        lambda x: functionalize(vmap(grad(lambda x: f(x).sum())))(torch.stack([x, 2 * x]))
    ),
}
FIRST_AND_LAST = torch.tensor([0, 2])
WRITES: dict[str, Function] = {
    "zero_": lambda y: y.zero_(),
    "fill_": lambda y: y.fill_(2),
    "masked_fill_": lambda y: y.masked_fill_(X > 0, 0),
    "index_put_": lambda y: y.index_put_((FIRST_AND_LAST,), torch.ones(2)),
    "index_fill_": lambda y: y.index_fill_(0, FIRST_AND_LAST, 1),
    "add_": lambda y: y.add_(1),
    "write into a view": lambda y: y.view(3, 1).zero_().view(3),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
@pytest.mark.parametrize("act", [nothing, cloned])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", FUNCTIONALIZED_WITHIN)
def test_ops_in_place_under_functionalize_have_their_gradients(
    name: str, write: str, act: Callable[..., Any]
) -> None:
    def run() -> list[list[float] | None] | str:
        """Return value and gradient, or torch's error, as torch differentiates not all of these."""
        x = X.clone().requires_grad_()
        try:
            result = program(x)
            if result.requires_grad:
                result.sum().backward()
        except RuntimeError as error:
            return str(error)
        return [result.tolist(), None if x.grad is None else x.grad.tolist()]

    program = FUNCTIONALIZED_WITHIN[name](lambda x: WRITES[write](x.clone()).sin())
    bare = run()
    with amanda.apply(Everywhere(act)):
        assert [run(), run()] == [bare, bare]


def test_a_differentiable_value_of_an_op_in_place_has_its_gradient_under_functionalize() -> None:
    @amanda.differentiable
    def triple(y: Tensor) -> Tensor:
        return 3 * y

    x = X.clone().requires_grad_()
    with amanda.apply(At("add_", after=triple)):
        functionalize(lambda x: x.clone().add_(1))(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))  # type: ignore[arg-type]


def test_a_differentiable_value_of_a_view_is_named_in_the_report_under_functionalize() -> None:
    with amanda.apply(At("view", after=amanda.differentiable(torch.clone))) as scope:
        functionalize(vmap(lambda x: (x := x.clone(), x.view(3).zero_())[0]))(ROWS)
    assert ["reaches the value alone" in entry.reason for entry in scope.report] == [True]


def test_a_changed_value_acts_under_functionalize_alone() -> None:
    with amanda.apply(At("sin", after=lambda y: 3 * y)) as scope:
        tripled = functionalize(torch.sin)(X)
        assert not list(scope.report)
        slope = functionalize(grad(lambda x: x.sin().sum()))(X)
    assert torch.equal(tripled, 3 * X.sin())
    assert torch.equal(slope, X.cos())
    (entry,) = scope.report
    assert entry.what == "torch.func.functionalize"
    assert "stays as it was" in entry.reason


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_primal_ops_of_linearize_are_seen_and_the_recorded_program_is_named() -> None:
    bare = linearize(composed, X)[1](X)
    with amanda.apply(Everywhere(cloned)) as scope:
        assert torch.equal(linearize(composed, X)[1](X), bare)
    (entry,) = (entry for entry in scope.report if entry.what == "torch.func.linearize")
    assert entry.reason.startswith("its tangents are a recorded program, of ATen's operators: ")
    assert {"mul", "mv"} <= set(re.findall(r"\d+ (\w+)", entry.reason))
    tool = Everywhere()
    with amanda.apply(tool):
        _, tangents = linearize(lambda x: x.sin().cos(), X)
        assert [op for op, *_ in tool.forward][:2] == ["sin", "cos"]
    with amanda.apply(tool):
        tool.forward.clear()
        tangents(X)
    assert "mul" in [op for op, *_ in tool.forward]


def test_values_of_a_transform_that_has_ended_are_seen_within_others() -> None:
    curvatures = vmap(hessian(lambda x: torch.ones_like(x).sum()))
    for routine in (nothing, unchanged, cloned):
        assert_transparent(lambda: curvatures(ROWS), routine)


def test_an_error_within_a_transform_leaves_no_transform_in_force() -> None:
    def fail(x: Tensor) -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"), amanda.apply(At("sin", after=fail)):
        vmap(grad(torch.sin))(X)
    assert torch._C._functorch.peek_interpreter_stack() is None


def test_equal_values_at_as_strided_are_laid_out_as_the_originals() -> None:
    def program(x: Tensor) -> Tensor:
        return x.as_strided((2, 2), (1, 1))

    assert_transparent(lambda: vmap(program)(ROWS), cloned)
    assert_transparent(lambda: grad(lambda x: program(x).square().sum())(X), cloned)


def test_equal_values_of_expanded_tensors_have_tangents_of_their_elements() -> None:
    def program(x: Tensor) -> Tensor:
        return jvp(hessian(lambda x: x.abs().sum()), (x,), (x,))[1]  # type: ignore[no-any-return]

    assert_transparent(lambda: program(X), cloned)


def test_an_op_that_torch_refuses_to_write_is_refused_in_the_same_words() -> None:
    refused = hessian(lambda x: x.geometric_(0.5).sum())
    with pytest.raises(RuntimeError, match="leaf Variable"):
        refused(X)
    with pytest.raises(RuntimeError, match="leaf Variable"), amanda.apply(Everywhere()):
        refused(X)


def test_statistics_of_batched_normalisation_can_be_written_by_routines() -> None:
    def program(x: Tensor) -> Tensor:
        samples, mean = x.expand(2, 4, 3, 3).clone().requires_grad_(), torch.zeros(2, 3)

        def normalised(x: Tensor, mean: Tensor) -> Tensor:
            result: Tensor = torch._native_batch_norm_legit(x, None, None, mean, mean + 1, False, 0.1, 1e-5)[
                0
            ]
            return result

        vmap(normalised)(samples, mean).square().sum().backward()
        assert samples.grad is not None
        return torch.cat([samples.grad.flatten(), mean.flatten()])

    assert_transparent(lambda: program(X), cloned)


def test_calls_in_the_rule_of_a_custom_op_for_vmap_are_part_of_the_op() -> None:
    @torch.library.custom_op("amanda_tests::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return 2 * x

    @double.register_vmap
    def _(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return double(x.movedim(in_dims[0], 0)), 0

    tool = Everywhere(cloned)
    with amanda.apply(tool):
        doubled = vmap(double)(ROWS)
    assert torch.equal(doubled, 2 * ROWS)
    names = [op for op, *_ in tool.forward]
    assert names.count("amanda_tests::double") == 1
    assert "movedim" not in names
