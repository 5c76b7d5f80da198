"""Higher-order ops in compiled functions: bodies that run at their call are seen, the rest is reported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import amanda


class Doubled(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def in_cond(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
    return result


def in_map(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = mapped(lambda row: row.sin(), x)
    return result


def in_scan(x: torch.Tensor) -> torch.Tensor:
    _, rows = scan(lambda carry, row: (carry + row, row.sin()), torch.zeros(3), x)
    result: torch.Tensor = rows
    return result


def in_while(x: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((), dtype=torch.int64)
    _, last = while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x.sin()), (start, x))
    result: torch.Tensor = last
    return result


def in_checkpoint(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(lambda x: x.sin(), x, use_reentrant=False)
    return result


def in_function(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
    return result


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does
@pytest.mark.parametrize(
    ("inner", "subject", "inside"),
    [
        (in_cond, "cond", "1 sin, 1 cos"),
        (in_map, "map_impl", "1 sin"),
        (in_scan, "scan", "sin"),
        (in_while, "while_loop", "sin"),
        (in_function, "autograd_function_apply", "mul"),
    ],
)
def test_the_report_names_the_ops_inside_and_numbers_stay(
    inner: Callable[[torch.Tensor], torch.Tensor], subject: str, inside: str
) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x.exp()).tanh()

    op_types: list[str] = []
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if str(context.namespace).endswith("graph"):
            op_types.append(context.get_op_type())
        context.insert_after_op(amanda.observer(lambda *outputs: None))

    tool.add_inst_for_op(analyse)
    x = torch.linspace(0, 1, 6).reshape(2, 3)
    x.requires_grad_(subject == "autograd_function_apply")
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    bare = compiled(x)
    with amanda.apply(tool, compiled="instrument") as scope:
        result = compiled(x)
    assert torch.equal(result, bare)
    assert op_types[0] == "exp"
    assert op_types[-1] == "tanh"
    assert not {"sin", "cos"} & set(op_types)
    (entry,) = (reported for reported in scope.report if reported.what == subject)
    assert entry.reason.startswith("ops inside of a higher-order op are not instrumented: ")
    assert inside in entry.reason
    assert entry.where.startswith(__file__)


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


def test_ops_that_recompute_by_a_policy_of_the_user_are_named() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def context_fn() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    def program(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(
            lambda x: x.sin().cos(), x, use_reentrant=False, context_fn=context_fn
        )
        return result.exp()

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    x = torch.ones(3, requires_grad=True)
    bare, tool = compiled(x), Acting()
    with amanda.apply(tool, compiled="instrument") as scope:
        assert torch.equal(compiled(x), bare)
    assert [op for op, *_ in tool.ops] == ["exp"]
    (entry,) = scope.report
    assert (entry.what, "1 sin, 1 cos" in entry.reason) == ("tag_activation_checkpoint", True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
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
