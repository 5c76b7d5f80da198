"""torch.func transforms in compiled functions: ops inside are ops, for traceable routines and observers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap

import amanda

# Of torch.jit, with which torch decomposes tangents.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")

Program = Callable[[Tensor], Tensor]

WEIGHT = torch.linspace(-1, 1, 9).reshape(3, 3)
ROWS = torch.linspace(0, 1, 6).reshape(2, 3)


def loss(row: Tensor) -> Tensor:
    return torch.sin(WEIGHT @ row).sum()


def in_place(row: Tensor) -> Tensor:
    return row.clone().sin_().mul_(2)


PROGRAMS: dict[str, Program] = {
    "vmap": lambda x: torch.cos(vmap(lambda row: torch.sin(WEIGHT @ row))(x)),
    "nested vmap": vmap(vmap(torch.sin)),
    "grad": lambda x: torch.cos(grad(loss)(x[0])),
    "per sample": vmap(grad(loss)),
    "jvp": lambda x: jvp(torch.sin, (x,), (x.exp(),))[1],
    "jacrev": lambda x: jacrev(lambda row: torch.sin(WEIGHT @ row))(x[0]),
    "hessian": lambda x: hessian(loss)(x[0]),
    "in place": vmap(in_place),
}


class AtSines(amanda.Tool):
    """Records all ops; inserts a routine after each sine, and counts it."""

    def __init__(self, routine: Callable[..., Any] | None = None) -> None:
        self.ops: list[tuple[str, str, int]] = []
        self.calls = 0
        self.routine = routine
        self.add_inst_for_op(self.analyse, guard="read")

    def analyse(self, context: amanda.OpContext) -> None:
        self.ops.append((context.get_op_type(), context.get_source(), context.get_samples()))
        if context.get_op_type().startswith("sin"):
            context.insert_after_op(self.count, outputs=[])
            if self.routine is not None:
                context.insert_after_op(self.routine)

    @amanda.observer
    def count(self) -> None:
        self.calls += 1


def compiled(program: Program, backend: str = "aot_eager") -> Program:
    torch._dynamo.reset()
    return torch.compile(lambda x: program(x), backend=backend, fullgraph=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_observer_sees_each_op_and_changes_no_number(name: str) -> None:
    function, tool = compiled(PROGRAMS[name]), AtSines()
    bare = function(ROWS)
    with amanda.apply(tool, compiled="instrument") as scope:
        assert torch.equal(function(ROWS), bare)
    sines = [entry for entry in tool.ops if entry[0].startswith("sin")]
    assert tool.calls == len(sines) == 1
    assert sines[0][1].startswith(__file__)
    assert not list(scope.report)
    assert torch.equal(function(ROWS), bare)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager") for name in PROGRAMS),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("vmap", "per sample")),
    ],
)
def test_a_traceable_routine_acts_as_in_eager_mode(name: str, backend: str) -> None:
    function = compiled(PROGRAMS[name], backend)
    bare = function(ROWS)
    with amanda.apply(AtSines(amanda.traceable(lambda y: y * y + 1))):
        expected = PROGRAMS[name](ROWS)
    with amanda.apply(AtSines(amanda.traceable(lambda y: y * y + 1)), compiled="instrument"):
        changed = function(ROWS)
    torch.testing.assert_close(changed, expected)
    # The gradient passes straight through, so that a derivative of the last op alone stays what it was.
    assert name in ("grad", "per sample", "jvp", "jacrev", "hessian") or not torch.equal(changed, bare)
    assert torch.equal(function(ROWS), bare)


def test_a_traceable_replacement_acts_within_a_transform() -> None:
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "sin":
            context.replace_op(amanda.traceable(lambda x: torch.exp(x)))

    tool.add_inst_for_op(analyse)
    function = compiled(vmap(grad(lambda row: row.sin().sum())))
    with amanda.apply(tool, compiled="instrument"):
        torch.testing.assert_close(function(ROWS), ROWS.exp())


def test_a_held_tensor_is_read_at_each_execution_within_a_transform() -> None:
    mask = torch.ones(3)
    function = compiled(PROGRAMS["vmap"])
    with amanda.apply(AtSines(amanda.traceable(lambda y: y * mask)), compiled="instrument"):
        first = function(ROWS)
        mask[0] = 0
        second = function(ROWS)
    assert torch.equal(first[:, 1:], second[:, 1:])
    assert torch.equal(second[:, 0], torch.ones(2))


def test_the_samples_of_a_vmap_are_known_at_analysis() -> None:
    tool = AtSines()
    with amanda.apply(tool, compiled="instrument"):
        compiled(PROGRAMS["vmap"])(ROWS)
        compiled(PROGRAMS["nested vmap"])(ROWS)
    assert [(op, samples) for op, _, samples in tool.ops] == [
        ("matmul", 2), ("sin", 2), ("cos", 1), ("sin", 6),
    ]  # fmt: skip


def test_routines_that_are_called_as_python_are_named_and_left_out() -> None:
    function = compiled(PROGRAMS["vmap"])
    bare, calls = function(ROWS), []
    with amanda.apply(AtSines(lambda y: calls.append(y)), compiled="instrument") as scope:
        assert torch.equal(function(ROWS), bare)
    assert not calls
    (entry,) = scope.report
    assert entry.what == "torch.func transforms in a graph"
    assert entry.reason == "routines that are called as Python do not run there: 1 sin"


def test_backward_ops_within_a_transform_are_named() -> None:
    function, tool = compiled(PROGRAMS["per sample"]), AtSines()
    tool.add_inst_for_op(lambda context: None, backward=True)
    with amanda.apply(tool, compiled="instrument") as scope:
        function(ROWS)
    (entry,) = scope.report
    assert entry.reason == (
        "backward ops are not instrumented there: 1 MvBackward0, 1 SinBackward0, 1 SumBackward0"
    )
