"""Higher-order ops in eager mode: the ops of their bodies are ops, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import amanda

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # dynamo does
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),  # too
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]


class Net(nn.Module):
    """Tensors of all kinds that bodies read: parameters, inputs that need a gradient, none of a module."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.x, self.y, self.w = (nn.Parameter(torch.rand(3, generator=generator)) for _ in range(3))
        self.rows = nn.Parameter(torch.rand(5, 3, generator=generator))
        for parameter in (*self.layer.parameters(), *self.other.parameters()):
            parameter.data.uniform_(-1, 1, generator=generator)


def is_positive(x: Tensor) -> Tensor:
    return x.sum() > 0


def start() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def fewer(count: int) -> Callable[..., Tensor]:
    return lambda i, *_: i < count


Program = Callable[[Net], Any]

CONDITIONS: dict[str, Program] = {
    "branch of two operands": lambda net: torch.cond(
        is_positive(net.x), lambda a, b: a.sin(), lambda a, b: b.cos(), (net.x * 2, net.y * 2)
    ),
    "operand that no branch reads": lambda net: torch.cond(
        is_positive(net.x), lambda a, b: a.sin(), lambda a, b: a.cos(), (net.x, net.y)
    ),
    "constant": lambda net: torch.cond(is_positive(net.x), lambda a: torch.zeros(3), torch.cos, (net.x,)),
    "captured": lambda net: torch.cond(is_positive(net.x), lambda a: a.sin() * net.w, torch.cos, (net.x,)),
    "layers": lambda net: torch.cond(
        is_positive(net.x), lambda a: net.layer(a).tanh() * a, lambda a: net.other(a), (net.x,)
    ),
    "other layer": lambda net: torch.cond(
        is_positive(-net.x), lambda a: net.layer(a).tanh() * a, lambda a: net.other(a), (net.x * 2,)
    ) * net.x,
    "detached": lambda net: torch.cond(
        is_positive(net.x), lambda a: (a.sin(), a.detach() * 2), lambda a: (a.cos(), a * 2), (net.x,)
    ),
    "dict": lambda net: torch.cond(
        is_positive(net.x), lambda d: {"y": d["a"].sin()}, lambda d: {"y": d["a"].cos()}, ({"a": net.x},)
    ),
    "nested": lambda net: torch.cond(
        is_positive(net.x),
        lambda a: torch.cond(is_positive(a), torch.sin, torch.cos, (a,)),
        torch.cos,
        (net.x,),
    ),
}  # fmt: skip
LOOPS: dict[str, Program] = {
    "map": lambda net: mapped(lambda row, b: row.sin() * b, net.rows, net.y * 2),
    "map of an argument that is not read": lambda net: mapped(lambda row, b: row.sin(), net.rows, net.y),
    "map of nested results": lambda net: mapped(lambda row: (row.sin(), {"a": row.cos()}), net.rows),
    "map of a constant": lambda net: mapped(lambda row: (row.sin(), torch.zeros(3)), net.rows),
    "scan": lambda net: scan(lambda carry, row: (carry * row, carry + row), net.x, net.rows),
    "scan of nested carries": lambda net: scan(
        lambda carry, row: (
            {"a": carry["a"] * row, "b": carry["b"] + row},
            (carry["a"] + row, carry["b"] * row),
        ),
        {"a": net.x, "b": net.y},
        net.rows,
    ),
    "scan in reverse": lambda net: scan(
        lambda carry, row: (carry * row, carry + row), net.rows[:, 0].contiguous(), net.rows, dim=1,
        reverse=True,
    ),
    "while_loop": lambda net: while_loop(
        fewer(3), lambda i, a: (i + 1, a.sin() * net.w), (start(), net.x)
    ),
    "while_loop of a layer": lambda net: while_loop(
        fewer(3), lambda i, a: (i + 1, net.layer(a).tanh() * a), (start(), net.x)
    ),
    "while_loop of a dict": lambda net: while_loop(
        fewer(3), lambda i, d: (i + 1, {"a": d["a"].sin()}), (start(), {"a": net.x})
    ),
}  # fmt: skip
OTHERS: dict[str, Program] = {
    "associative_scan": lambda net: associative_scan(
        lambda a, b: a * b.sin(), net.rows, dim=0, combine_mode="generic"
    ),
    "checkpoint": lambda net: checkpoint(lambda x: net.layer(x).tanh(), net.x * 2, use_reentrant=False),
    "nested_compile_region": lambda net: torch.compiler.nested_compile_region(net.layer)(net.x),
}
PROGRAMS = {**CONDITIONS, **LOOPS, **OTHERS}


class Recorder(amanda.Tool):
    """Records the ops that it analyses, and observes or copies what they compute."""

    def __init__(self, copies: bool = False) -> None:
        self.ops: list[tuple[str, str]] = []
        self.backward_ops: list[tuple[str, str]] = []
        self.calls = 0
        self.copies = copies
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        self.ops.append((context.get_op_type(), context.get_scope()))
        context.insert_after_op(self.copy if self.copies else self.observe)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        self.backward_ops.append((context.get_forward_op_type(), context.get_backward_op().__name__))

    @amanda.observer
    def observe(self, *values: Any) -> None:
        self.calls += 1

    def copy(self, *values: Any) -> Any:
        return [value.clone() if isinstance(value, Tensor) else value for value in values]


def numbers(program: Program, net: Net) -> tuple[list[Any], list[Any]]:
    """Return the tensors that a program computes, and the gradients of all parameters."""
    results = [value for value in tree_leaves(program(net)) if isinstance(value, Tensor)]
    trained = [value for value in results if value.requires_grad]
    weights = [torch.arange(1.0, value.numel() + 1).reshape(value.shape) for value in trained]
    gradients: Sequence[Any] = ()
    if trained:
        gradients = torch.autograd.grad(trained, list(net.parameters()), weights, allow_unused=True)
    return results, list(gradients)


def assert_same(left: Sequence[Any], right: Sequence[Any]) -> None:
    assert [value is None for value in left] == [value is None for value in right]
    for a, b in zip(left, right, strict=True):
        if a is not None:
            assert torch.equal(a, b)
            assert a.requires_grad == b.requires_grad
            assert a.stride() == b.stride()


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_without_tools(name: str) -> None:
    net = Net()
    bare, bare_gradients = numbers(PROGRAMS[name], net)
    for copies in (False, True):
        with amanda.apply(Recorder(copies)):
            seen, gradients = numbers(PROGRAMS[name], net)
        assert_same(bare, seen)
        assert_same(bare_gradients, gradients)


@pytest.mark.parametrize("name", ["other layer", "map", "while_loop"])
def test_bodies_run_op_by_op_where_graphs_are_instrumented(name: str) -> None:
    net, tool = Net(), Recorder()
    bare, bare_gradients = numbers(PROGRAMS[name], net)
    with amanda.apply(tool, compiled="instrument"):
        seen, gradients = numbers(PROGRAMS[name], net)
    assert_same(bare, seen)
    assert_same(bare_gradients, gradients)
    assert {"linear", "sin"} & {op for op, _ in tool.ops}


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_without_gradients_are_those_without_tools(name: str) -> None:
    net = Net()
    with torch.no_grad():
        bare, _ = numbers(PROGRAMS[name], net)
        with amanda.apply(Recorder()):
            seen, _ = numbers(PROGRAMS[name], net)
    assert_same(bare, seen)


def step(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).tanh()


@pytest.mark.parametrize(
    ("program", "times"),
    [
        (lambda net: torch.cond(is_positive(net.x), lambda a: step(net, a), torch.cos, (net.x,)), 1),
        (lambda net: mapped(lambda row: step(net, row), net.rows), 5),
        (lambda net: scan(lambda carry, row: (step(net, carry) * row, carry + row), net.x, net.rows), 5),
        (lambda net: while_loop(fewer(3), lambda i, a: (i + 1, step(net, a)), (start(), net.x)), 3),
        (lambda net: checkpoint(lambda x: step(net, x), net.x * 2, use_reentrant=False), 1),
        (lambda net: torch.compiler.nested_compile_region(lambda x: step(net, x))(net.x), 1),
    ],
    ids=["cond", "map", "scan", "while_loop", "checkpoint", "nested_compile_region"],
)
def test_an_op_of_a_body_is_an_op_of_its_module_with_its_backward_op(program: Program, times: int) -> None:
    calls = {"linear": 0, "TanhBackward0": 0}
    scopes: set[tuple[str, str]] = set()
    tool = amanda.Tool()

    def count(name: str) -> Callable[..., None]:
        def routine() -> None:
            calls[name] += 1

        return amanda.observer(routine)

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            scopes.add((context.get_scope(), context.get_source().rpartition(":")[0]))
            context.insert_after_op(count("linear"), outputs=[])

    def analyse_backward(context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__
        if name in calls:
            context.insert_after_backward_op(count(name), grad_inputs=[])

    tool.add_inst_for_op(analyse)
    tool.add_inst_for_op(analyse_backward, backward=True)
    with amanda.apply(tool) as scope:
        numbers(program, Net())
    assert calls["linear"] == times
    assert calls["TanhBackward0"] == times
    assert not [entry for entry in scope.report if "make_fx" in entry.what or "compiled" in entry.what]
    ((module, file),) = scopes
    assert module.endswith("layer") or module == ""
    assert file.endswith(("test_higher_order.py", "linear.py"))


@pytest.mark.parametrize("name", ["captured", "while_loop"])
def test_a_changed_value_acts_forward_and_backward(name: str) -> None:
    net, tool = Net(), amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "sin":
            context.insert_before_op(lambda x: 2 * x)

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        _, gradients = numbers(PROGRAMS[name], net)
    # The op and its backward op are computed on the routine's value, whose gradient goes to the original.
    x, w = net.x.detach(), net.w.detach()
    upstream, slope = torch.arange(1.0, 4), torch.ones(3)
    inputs = []
    for _ in range(3 if name == "while_loop" else 1):
        inputs.append(2 * x)
        x = (2 * x).sin() * w
    for value in reversed(inputs):
        slope = slope * w * value.cos()
    torch.testing.assert_close(gradients[0], upstream * slope)


def test_a_replaced_op_of_a_branch_is_replaced() -> None:
    net, tool = Net(), amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "sin":
            context.replace_op(torch.cos)

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        results, gradients = numbers(CONDITIONS["captured"], net)
    assert torch.equal(results[0], net.x.cos() * net.w)
    assert torch.equal(gradients[2], torch.arange(1.0, 4) * net.x.cos())


def test_gradients_of_the_program_that_may_be_rounded_otherwise_are_reported() -> None:
    net = Net()
    with amanda.apply(amanda.Tool()) as scope, torch.no_grad():
        numbers(LOOPS["scan"], net)
    assert not list(scope.report)
    with amanda.apply(amanda.Tool()) as scope:
        numbers(LOOPS["scan"], net)
    (entry,) = scope.report
    assert (entry.what, "rounded otherwise" in entry.reason) == ("scan", True)


def test_score_mod_of_flex_attention_is_seen_and_acts() -> None:
    query = torch.rand(1, 1, 128, 16, generator=torch.Generator().manual_seed(0))
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "sin":
            context.replace_op(torch.cos)

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        changed = flex_attention(query, query, query, score_mod=lambda score, *_: score.sin())
    expected = flex_attention(query, query, query, score_mod=lambda score, *_: score.cos())
    assert torch.equal(changed, expected)


def test_torch_is_as_it_was_after_a_scope() -> None:
    from torch._higher_order_ops.cond import CondOp

    before = vars(CondOp)["__call__"]
    with amanda.apply(amanda.Tool()):
        assert vars(CondOp)["__call__"] is not before
    assert vars(CondOp)["__call__"] is before
