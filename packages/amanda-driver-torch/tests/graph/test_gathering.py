"""Observers of compiled code wait for each other: few calls of Python hand their values over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.drivers.torch.graph._observers import MAX_WAITING
from amanda.drivers.torch.graph._ops import GraphExecution

Seen = list[tuple[str, list[torch.Tensor]]]


class Seeing(amanda.Tool):
    """Keeps the values that ops and backward ops read and give, by type; many: sizes of gathered calls."""

    def __init__(self) -> None:
        self.records: Seen = []
        self.many: list[int] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        kind = context.get_op_type()
        context.insert_before_op(self.see, kind=f"before {kind}")
        context.insert_after_op(self.see, kind=kind)

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_after_backward_op(self.see, kind=context.get_backward_op().__name__)

    @amanda.observer
    def see(self, *values: Any, kind: str) -> None:
        self.records.append((kind, [value.clone() for value in values if isinstance(value, torch.Tensor)]))


class Together(Seeing):
    """The same, by a gathered form."""

    see = amanda.observer(lambda self, *values, kind: Seeing.see(self, *values, kind=kind))

    @amanda.gathered(see)
    def see_all(self, executions: amanda.action.Executions) -> None:
        self.many.append(len(executions))
        for execution in executions:
            self.see(*execution.values, **execution.kwargs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slots of the calls of Python that compiled code makes."""
    slots: list[int] = []
    original = GraphExecution.call_at

    def call_at(self: GraphExecution, slot: int, *args: Any) -> Any:
        slots.append(slot)
        return original(self, slot, *args)

    monkeypatch.setattr(GraphExecution, "call_at", call_at)
    return slots


def written(x: torch.Tensor) -> torch.Tensor:
    """A program that writes into what it has computed before."""
    doubled = x * 2
    doubled[0].add_(1)
    return doubled.sin().relu_()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4), nn.Tanh()] * 3)


def run(program: Callable[[Any], torch.Tensor]) -> None:
    program(torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()).backward(torch.ones(4, 4))


def by_kind(records: Seen) -> Seen:
    return sorted(
        ((kind, values) for kind, values in records), key=lambda record: (record[0], str(record[1]))
    )


@pytest.mark.parametrize("make", [Seeing, Together])
@pytest.mark.parametrize("program", [written, layers()])
def test_observers_see_the_values_of_eager_mode_in_few_calls(
    make: Callable[[], Seeing], program: Callable[[Any], torch.Tensor], calls: list[int]
) -> None:
    eager, tool = Seeing(), make()
    with amanda.apply(eager):
        run(program)
    compiled = torch.compile(program, backend="aot_eager")
    for _ in range(2):
        calls.clear()
        tool.records.clear()
        with amanda.apply(tool, compiled="instrument") as scope:
            run(compiled)
        assert not scope.report
        for (kind, values), (compiled_kind, compiled_values) in zip(
            by_kind(eager.records), by_kind(tool.records), strict=True
        ):
            assert kind == compiled_kind
            assert all(map(torch.equal, values, compiled_values))
        if program is not written:
            assert len(calls) == 2
    assert (max(tool.many, default=0) > 1) == (make is Together)


def test_no_more_tensors_wait_than_are_allowed(calls: list[int]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(MAX_WAITING):
            x = x + 1
        return x

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(amanda.observer(lambda output: None)))
    with torch.no_grad(), amanda.apply(tool, compiled="instrument"):
        torch.compile(lambda x: program(program(x)).sum(), backend="aot_eager")(torch.zeros(2))
    assert len(calls) == 3


def test_an_observer_beside_a_routine_of_its_tool_keeps_its_turn() -> None:
    turns: list[str] = []
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        kind = context.get_op_type()
        context.insert_before_op(amanda.observer(lambda value: turns.append(f"before {kind}")), inputs=[0])
        context.insert_after_op(lambda output: turns.append(f"after {kind}"))

    tool.add_inst_for_op(analyse)
    x = torch.zeros(2)
    with amanda.apply(tool, compiled="instrument"):
        torch.compile(lambda x: x.exp().sin(), backend="aot_eager")(x)
    assert turns == ["before exp", "after exp", "before sin", "after sin"]


def test_an_exception_of_an_observer_that_waited_names_its_op() -> None:
    def refuse(output: torch.Tensor) -> None:
        raise ValueError("no")

    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: (
            context.insert_after_op(amanda.observer(refuse)) if context.get_op_type() == "sin" else None
        )
    )
    with amanda.apply(tool, compiled="instrument"), pytest.raises(ValueError, match="no") as caught:
        torch.compile(lambda x: x.sin().exp(), backend="aot_eager")(torch.zeros(2))
    assert "sin" in "".join(getattr(caught.value, "__notes__", ["sin"]))  # Python 3.10 has no notes
