"""Tools that scale an op by what they hold, each in another way; and one that records calls."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from amanda.action import observer, traceable
from amanda.context import OpContext
from amanda.tool import Tool

if TYPE_CHECKING:
    from amanda.testing._graph_suite import GraphSample

SCALE: Any = 1.0


class Scaling(Tool):
    """Scales what the sample's op gives by what it holds: a number, or a tensor."""

    def __init__(self, sample: GraphSample, held: Any) -> None:
        self.sample = sample
        self.held = held
        self.set_up()
        self.add_inst_for_op(self.analyse)

    def set_up(self) -> None:
        """Nothing more is needed."""

    def analyse(self, context: OpContext) -> None:
        """Insert the routine at the sample's op."""
        if context.get_op_type() == self.sample.op:
            self.sample.insert(context, self.routine())

    def routine(self) -> Callable[..., Any]:
        """Return what is inserted."""
        return self.scaled

    @traceable
    def scaled(self, value: Any) -> Any:
        """The op's value times what is held."""
        return value * self.held

    def hold(self, held: Any) -> None:
        """Hold something else."""
        self.held = held


class InContainer(Scaling):
    """In a list in a dict."""

    def set_up(self) -> None:
        self.all = {"one": [self.held]}

    @traceable
    def scaled(self, value: Any) -> Any:
        return value * self.all["one"][0]

    def hold(self, held: Any) -> None:
        self.all["one"][0] = held


class InObject(Scaling):
    """In an object that a property reads."""

    def set_up(self) -> None:
        self.options = SimpleNamespace(scale=self.held)

    @property
    def scale(self) -> Any:
        """Return what is held."""
        return self.options.scale

    @traceable
    def scaled(self, value: Any) -> Any:
        return value * self.scale

    def hold(self, held: Any) -> None:
        self.options.scale = held


class InClosure(Scaling):
    """In a variable of the function that makes the routine."""

    def set_up(self) -> None:
        held = self.held

        def hold(value: Any) -> None:
            nonlocal held
            held = value

        self.hold = hold  # type: ignore[assignment, method-assign]
        self.scaling = traceable(lambda value: value * held)

    def routine(self) -> Callable[..., Any]:
        return self.scaling


class InGlobal(Scaling):
    """In a variable of a module."""

    def set_up(self) -> None:
        self.hold(self.held)

    @traceable
    def scaled(self, value: Any) -> Any:
        return value * SCALE

    def hold(self, held: Any) -> None:
        globals()["SCALE"] = held


class ByName(Scaling):
    """In an attribute whose name is a constant."""

    @traceable
    def scaled(self, value: Any) -> Any:
        return value * getattr(self, "held")  # noqa: B009


class Hidden(Scaling):
    """In an attribute whose name is computed."""

    @traceable
    def scaled(self, value: Any) -> Any:
        return value * getattr(self, "".join(["he", "ld"]))


class Listed(Scaling):
    """In a list to which the routine itself appends."""

    def set_up(self) -> None:
        self.scales: list[Any] = []

    @traceable
    def scaled(self, value: Any) -> Any:
        self.scales.append(self.held)
        return value * self.scales[-1]


class Switched(Scaling):
    """Changes nothing while it holds 1."""

    @traceable
    def scaled(self, value: Any) -> Any:
        return None if self.held == 1 else value * self.held


class CallRecorder(Tool):
    """Records what is called before and after each op.

    calls: type and number of an op, and "before" or "after".  analysed: numbers of ops, in order.
    """

    def __init__(self, observing: bool) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.analysed: list[int] = []
        self.observing = observing
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Insert a routine before and one after an op that has inputs and outputs."""
        if context.get_inputs():
            name, number = context.get_op_type(), len(self.analysed)
            self.analysed.append(number)
            context.insert_before_op(self.recording(name, number, "before"))
            context.insert_after_op(self.recording(name, number, "after"))

    def recording(self, name: str, number: int, point: str) -> Callable[..., Any]:
        """Return a routine that records its calls."""

        def record(*values: Any) -> None:
            self.calls.append((name, number, point))

        return observer(record) if self.observing else record
