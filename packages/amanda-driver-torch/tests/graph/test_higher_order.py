"""Higher-order ops in compiled functions: bodies that run at their call are seen, the rest is reported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import amanda

pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Doubled(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def in_function(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
    return result


def test_the_report_names_the_ops_of_a_function_and_numbers_stay() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return in_function(x.exp()).tanh()

    x = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    bare, tool = compiled(x), Acting()
    with amanda.apply(tool, compiled="instrument") as scope:
        assert torch.equal(compiled(x), bare)
    assert [op for op, *_ in tool.ops] == ["exp", "tanh"]
    (entry,) = (reported for reported in scope.report if reported.what == "autograd_function_apply")
    assert entry.reason.startswith("ops inside of a higher-order op are not instrumented: ")
    assert "mul" in entry.reason
    assert entry.where.startswith(__file__)


LAYER = torch.nn.Linear(3, 3)
with torch.no_grad():
    LAYER.weight.copy_(torch.linspace(-1, 1, 9).reshape(3, 3))
    LAYER.bias.fill_(0.5)


def layer(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(LAYER(x))


def start() -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64)


POLICY_CALLS: list[str] = []


def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    POLICY_CALLS.append(str(op))
    return CheckpointPolicy.MUST_SAVE if "addmm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def by_policy() -> Any:
    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


BODIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "cond": lambda x: torch.cond(x.sum() > 0, layer, torch.cos, (x,)),
    "map_impl": lambda x: mapped(layer, x),
    "scan": lambda x: scan(lambda carry, row: (carry + row, layer(row)), torch.zeros(3), x)[1],
    "while_loop": lambda x: while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, layer(x)), (start(), x))[1],
    "nested": lambda x: torch.cond(x.sum() > 0, lambda x: mapped(layer, x), torch.cos, (x,)),
    "tag_activation_checkpoint": lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=by_policy),
}
bodies = pytest.mark.parametrize("name", BODIES)


def step_of(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return the result and the gradients of a step."""
    x = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
    result = function(x)
    return [result, *torch.autograd.grad(result.sum(), [x, *LAYER.parameters()])]


def compiled_body(name: str, backend: str = "aot_eager") -> Callable[[torch.Tensor], torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda x: BODIES[name](x), backend=backend, fullgraph=True)


class AtLinear(amanda.Tool):
    """Records ops, and the weight that each linear op reads; inserts a routine after it."""

    def __init__(self, routine: Callable[..., Any] | None = None) -> None:
        self.ops: list[tuple[str, str]] = []
        self.weights: list[Any] = []
        self.routine = routine
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.ops.append((context.get_op_type(), context.get_source()))
        if context.get_op_type() == "linear":
            self.weights.append(context.get_value(1))
            if self.routine is not None:
                context.insert_after_op(self.routine)


@bodies
def test_ops_of_bodies_are_seen_with_their_weights_and_leave_all_bits(name: str) -> None:
    function, tool = compiled_body(name), AtLinear()
    bare = step_of(function)
    with amanda.apply(tool, compiled="instrument") as scope:
        assert_equal(step_of(function), bare)
    assert tool.weights == [LAYER.weight]
    assert any(op == "sin" and source.startswith(__file__) for op, source in tool.ops)
    assert not list(scope.report)


def unchanged(value: torch.Tensor) -> torch.Tensor:
    return value.clone()


@bodies
def test_an_equal_value_leaves_all_bits(name: str) -> None:
    function = compiled_body(name)
    bare = step_of(function)
    with amanda.apply(AtLinear(amanda.traceable(unchanged)), compiled="instrument"):
        assert_equal(step_of(function), bare)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.long])]
)
@bodies
def test_a_traceable_routine_acts_in_bodies_with_the_tensor_that_it_holds(name: str, backend: str) -> None:
    mask, function = torch.tensor([1.0, 0.0, 2.0]), compiled_body(name, backend)
    bare = step_of(function)
    tool = AtLinear(amanda.traceable(lambda y: y * mask))
    with amanda.apply(tool):
        expected = step_of(BODIES[name])
    with amanda.apply(tool, compiled="instrument") as scope:
        changed = step_of(function)
        mask.fill_(1.0)
        assert_close(step_of(function), bare)
    assert_close(changed, expected)
    assert not torch.equal(changed[0], bare[0])
    assert not [entry for entry in scope.report if "do not run" in entry.reason]
    assert_equal(step_of(function), bare)


@bodies
def test_routines_called_as_python_are_left_out_of_bodies_and_counted(name: str) -> None:
    calls: list[Any] = []
    function, tool = compiled_body(name), AtLinear(lambda y: calls.append(y))
    tool.add_inst_for_op(lambda context: None, backward=True)
    bare = step_of(function)
    with amanda.apply(tool, compiled="instrument") as scope:
        assert_equal(step_of(function), bare)
    assert not calls
    subject = "map_impl" if name == "nested" else name
    reasons = [entry.reason for entry in scope.report if entry.what == subject]
    assert "routines that are called as Python do not run there: 1 linear" in reasons
    assert any("not instrumented there: " in reason and "1 SinBackward0" in reason for reason in reasons)


def test_a_routine_that_cannot_be_traced_is_left_out_of_a_body() -> None:
    function = compiled_body("cond")
    bare = step_of(function)
    tool = AtLinear(amanda.traceable(lambda y: y * float(y.sum().item())))
    with amanda.apply(tool, compiled="instrument") as scope:
        assert_equal(step_of(function), bare)
    assert {entry.what for entry in scope.report} >= {"cond"}


def test_an_integer_that_a_loop_carries_leaves_the_loop_as_it_is() -> None:
    def program(x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (0, x))

    torch._dynamo.reset()
    function, x = torch.compile(program, backend="aot_eager", fullgraph=True), torch.rand(3)
    bare = function(x)
    with amanda.apply(AtLinear(), compiled="instrument"):
        assert torch.equal(function(x)[1], bare[1])


def assert_close(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b)


class Layers(torch.nn.Module):
    """Two calls of a layer, as one checkpoint or as two calls of a compile region."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 9).reshape(3, 3))
            self.layer.bias.fill_(0.5)
        self.kind = kind

    @torch.compiler.nested_compile_region
    def region(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.layer(x))

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self.step(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "region":
            return self.region(self.region(x)) * 2
        if self.kind == "checkpoint":
            result: torch.Tensor = checkpoint(self.twice, x, use_reentrant=False)
            return result * 2
        return self.twice(x) * 2


Numbers = list[torch.Tensor]


def run(function: Callable[..., torch.Tensor], model: torch.nn.Module) -> Numbers:
    """Return the result and the gradients of a step."""
    x = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
    result = function(x)
    return [result, *torch.autograd.grad(result.sum(), [x, *model.parameters()])]


def assert_equal(left: Numbers, right: Numbers) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


class Acting(amanda.Tool):
    """Counts and records ops, and acts at `sin`, forward or backward."""

    def __init__(
        self, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None
    ) -> None:
        self.ops: list[tuple[str, str, str]] = []
        self.backward_ops: list[str] = []
        self.calls = 0
        self.forward, self.backward = forward, backward
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if not str(context.namespace).endswith("graph"):
            return
        self.ops.append((context.get_op_type(), context.get_scope(), context.get_source()))
        context.insert_after_op(self.count, outputs=[])
        if context.get_op_type() == "sin" and self.forward is not None:
            context.insert_after_op(self.forward)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__
        if str(context.namespace).endswith("graph"):
            self.backward_ops.append(name)
        if name == "SinBackward0" and self.backward is not None:
            context.insert_after_backward_op(self.backward)

    @amanda.observer
    def count(self) -> None:
        self.calls += 1


def compiled_model(kind: str, backend: str = "aot_eager") -> tuple[Layers, Callable[..., torch.Tensor]]:
    torch._dynamo.reset()
    model = Layers(kind)
    return model, torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["checkpoint", "region"])
def test_ops_of_checkpoints_and_regions_are_ops_of_their_modules(kind: str) -> None:
    model, compiled = compiled_model(kind)
    bare, tool = run(compiled, model), Acting()
    with amanda.apply(tool, compiled="instrument") as scope:
        assert_equal(run(compiled, model), bare)
    assert [(op, module) for op, module, _ in tool.ops] == [
        ("linear", "layer"), ("sin", ""), ("linear", "layer"), ("sin", ""), ("mul", ""),
    ]  # fmt: skip
    assert next(line for op, _, line in tool.ops if op == "sin").startswith(__file__)
    assert tool.calls == 5
    assert tool.backward_ops.count("SinBackward0") == tool.backward_ops.count("AddmmBackward0") == 2
    assert not list(scope.report)
    assert_equal(run(compiled, model), bare)


@pytest.mark.parametrize("mark", [lambda routine: routine, amanda.traceable])
@pytest.mark.parametrize("kind", ["checkpoint", "region"])
def test_changed_values_and_gradients_in_checkpoints_and_regions_act(
    kind: str, mark: Callable[..., Any]
) -> None:
    reference, plain = compiled_model("plain")
    with amanda.apply(Acting(mark(lambda y: y * 3), mark(lambda g: g * 5)), compiled="instrument"):
        expected = run(plain, reference)
    model, compiled = compiled_model(kind)
    bare, tool = run(compiled, model), Acting(mark(lambda y: y * 3), mark(lambda g: g * 5))
    with amanda.apply(tool, compiled="instrument"):
        assert_equal(run(compiled, model), expected)
    assert not torch.equal(expected[0], bare[0])
    assert_equal(run(compiled, model), bare)


@pytest.mark.parametrize("kind", ["checkpoint", "region"])
def test_a_routine_called_as_python_runs_once_for_each_op(kind: str) -> None:
    sums: list[float] = []
    model, compiled = compiled_model(kind)
    with amanda.apply(Acting(amanda.observer(lambda y: sums.append(y.sum().item()))), compiled="instrument"):
        result, *_ = run(compiled, model)
    assert len(sums) == 2
    assert sums[1] == pytest.approx(result.sum().item() / 2)


def saved_tensors(model: Layers, compiled: Callable[..., torch.Tensor]) -> int:
    """Return the number of tensors that a compiled forward pass saves for its backward pass."""
    node: Any = compiled(torch.ones(2, 3, requires_grad=True)).grad_fn
    return len(node.saved_tensors)


def test_a_checkpoint_with_routines_saves_no_more_than_without() -> None:
    model, compiled = compiled_model("checkpoint")
    bare = saved_tensors(model, compiled)
    with amanda.apply(Acting(amanda.traceable(lambda y: y.clone())), compiled="instrument"):
        assert saved_tensors(model, compiled) == bare
    assert saved_tensors(*compiled_model("plain")) > bare


def test_a_policy_of_the_user_decides_about_the_ops_of_routines_too() -> None:
    function = compiled_body("tag_activation_checkpoint")
    step_of(function)
    POLICY_CALLS.clear()
    with amanda.apply(AtLinear(amanda.traceable(unchanged)), compiled="instrument"):
        step_of(function)
    assert {"aten.addmm.default", "aten.clone.default", "aten.sin.default"} <= set(POLICY_CALLS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "region"])
def test_ops_of_checkpoints_and_regions_are_instrumented_with_inductor(kind: str) -> None:
    model, compiled = compiled_model(kind, "inductor")
    bare, tool = run(compiled, model), Acting(lambda y: y * 3)
    with amanda.apply(tool, compiled="instrument"):
        changed = run(compiled, model)
    reference, plain = compiled_model("plain")
    with amanda.apply(Acting(lambda y: y * 3), compiled="instrument"):
        expected = run(plain, reference)
    for a, b in zip(changed, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert tool.calls == 5
    assert_equal(run(compiled, model), bare)
