"""Tools that the suites apply: recorders and inserters, no-op tools, tools that scale an output."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from amanda.action import observer, traceable
from amanda.context import OpContext
from amanda.tool import Tool

if TYPE_CHECKING:
    from amanda.testing._graph_suite import GraphSample
    from amanda.testing._sample import Sample

Callback = Callable[[OpContext], Any]

FORWARD_POINTS: list[dict[str, Any]] = [{}, {"require_outputs": True}]
BACKWARD_POINTS: list[dict[str, Any]] = [{"backward": True}, {"backward": True, "require_outputs": True}]
POINTS = FORWARD_POINTS + BACKWARD_POINTS


def op_name(context: OpContext) -> str:
    """Return the `__name__` of the op that the context is of, forward or backward."""
    op = context.get_op() if context.is_forward() else context.get_backward_op()
    return str(op.__name__)


def notes(error: BaseException) -> list[str]:
    """Return the notes on an exception, also before Python 3.11."""
    return list(getattr(error, "__notes__", []))


def tool(callback: Callback, only: str | None = None, **where: Any) -> Tool:
    """Return a tool with one analysis routine, at every op or at those of one name.

    where: the point, as for `add_inst_for_op`.
    """
    new_tool = Tool()
    add_routine(new_tool, callback, only, **where)
    return new_tool


def add_routine(target_tool: Tool, callback: Callback, only: str | None = None, **where: Any) -> Tool:
    """Add another analysis routine to a tool; return the tool.

    only: name of the ops at which it runs; None for all.  where: the point, as for `add_inst_for_op`.
    """

    def analysis(context: OpContext) -> None:
        if only is None or op_name(context) == only:
            callback(context)

    target_tool.add_inst_for_op(analysis, **where)
    return target_tool


Insertion = Literal[
    "insert_before_op",
    "insert_after_op",
    "replace_op",
    "insert_before_backward_op",
    "insert_after_backward_op",
    "replace_backward_op",
]


def inserter(action: Insertion, only: str, routine: Callable[..., Any], *select: Any, **kwargs: Any) -> Tool:
    """Return a tool that calls a method of the context, such as `insert_before_op`, at the ops of one name.

    select: positions of the values that the routine gets; all if absent.  kwargs: arguments for the routine.
    """
    return tool(
        lambda context: getattr(context, action)(routine, *select, **kwargs),
        only,
        backward="backward" in action,
    )


def trained_bits(sample: Sample) -> list[bytes]:
    """Run the model forward and backward; return the bits of its result and of its weights' gradients."""
    model, x = sample.model(), sample.input()
    result = model(x)
    sample.backward(result)
    gradients = [sample.gradient(layer.weight) for layer in (model.first, model.second)]
    return [sample.bits(value) for value in (result, *gradients)]


def free_garbage(sample: Sample) -> None:
    """Free what nothing refers to any more, also where a framework frees on threads of its own."""
    sample.wait_for_framework()
    gc.collect()
    sample.wait_for_framework()


class Referent:
    """An object that can be referenced weakly."""


class Seen(Tool):
    """Records (name, id) of each op that is analysed."""

    def __init__(self) -> None:
        self.ops: list[tuple[str, int]] = []
        self.add_inst_for_op(self._forward)

    def _forward(self, context: OpContext) -> None:
        self.ops.append((op_name(context), context.get_op_id()))

    def ids(self, name: str) -> list[int]:
        """Return the ids of the ops of one name, in the order of their analyses."""
        return [op_id for op, op_id in self.ops if op == name]


class Executed(Tool):
    """Records the id of each op of one name at every execution."""

    def __init__(self, only: str) -> None:
        self.ids: list[int] = []
        add_routine(self, self._insert, only)

    def _insert(self, context: OpContext) -> None:
        op_id = context.get_op_id()
        # A routine, since an analysis runs once and executions are what is counted.
        context.insert_before_op(lambda *_: self.ids.append(op_id))


def no_op_tool() -> Tool:
    """Return a tool with routines everywhere that change nothing."""
    new_tool = Tool()
    # At all four points, with routines at each, so that every path of a driver is taken.
    new_tool.add_inst_for_op(lambda context: context.insert_before_op(_unchanged))
    new_tool.add_inst_for_op(lambda context: context.insert_after_op(_unchanged), require_outputs=True)
    new_tool.add_inst_for_op(lambda context: context.insert_before_backward_op(_unchanged), backward=True)
    new_tool.add_inst_for_op(
        lambda context: context.insert_after_backward_op(_unchanged), backward=True, require_outputs=True
    )
    return new_tool


def _unchanged(*_: Any) -> None:
    return None


# Three tools for one oracle: whatever a program computes without tools, it computes with each of these.
class Unchanged(Tool):
    """Routines at every point of every op, which give back the values that they are given.

    analyses, backward_analyses, calls: how many there were.
    """

    def __init__(self) -> None:
        # Counted, so that a test can say that the tool was there at all.
        self.analyses = self.backward_analyses = self.calls = 0
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def _forward(self, context: OpContext) -> None:
        self.analyses += 1
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)

    def _backward(self, context: OpContext) -> None:
        self.backward_analyses += 1
        context.insert_before_backward_op(self.routine)
        context.insert_after_backward_op(self.routine)

    def routine(self, *values: Any) -> Any:
        """Count a call; return the values, or what a subclass gives instead."""
        self.calls += 1
        return values


class Silent(Unchanged):
    """Routines at every point of every op, which look at the values and give none back."""

    def routine(self, *values: Any) -> Any:
        self.calls += 1


class EqualCopies(Unchanged):
    """Routines at every point of every op, which give equal new values.

    Args:
        copied: Makes a tensor equal to its argument, and hands back an argument that is no tensor.
    """

    def __init__(self, copied: Callable[[Any], Any]) -> None:
        self.copied = copied
        super().__init__()

    def routine(self, *values: Any) -> Any:
        self.calls += 1
        # New objects with equal bits: what tells them from the originals is a fault of a driver.
        return [self._new_value(value) for value in values]

    def _new_value(self, value: Any) -> Any:
        """Return a new value equal to the one of a routine, also in lists."""
        # A named tuple is not made of one iterable, so it goes to the sample's own function.
        if isinstance(value, list) or type(value) is tuple:
            return type(value)(self._new_value(element) for element in value)
        return self.copied(value)


SCALE: Any = 1.0


class Scaling(Tool):
    """Multiplies the output of the sample's op by a held value: a number or a tensor.

    Args:
        sample: Framework's graphs, with the op whose output is multiplied.
        held: Number or tensor with which the op's output is multiplied.
    """

    def __init__(self, sample: GraphSample, held: Any) -> None:
        self.sample = sample
        self.held = held
        # Before the routine is registered: a subclass puts there what the routine reads.
        self.set_up()
        self.add_inst_for_op(self.analyse)

    def set_up(self) -> None:
        """Put `held` where the routine reads it; does nothing unless overridden."""

    def analyse(self, context: OpContext) -> None:
        """Insert the routine at the sample's op."""
        if context.get_forward_op_type() == self.sample.op:
            self.sample.insert(context, self.routine())

    def routine(self) -> Callable[..., Any]:
        """Return the routine that is inserted."""
        return self.scaled

    @traceable
    def scaled(self, value: Any) -> Any:
        """Return the op's value times what is held."""
        return value * self.held

    def hold(self, held: Any) -> None:
        """Hold something else."""
        self.held = held


class InContainer(Scaling):
    """Scaling by a value that is held in a list in a dict."""

    def set_up(self) -> None:
        self.all = {"one": [self.held]}

    @traceable
    def scaled(self, value: Any) -> Any:
        return value * self.all["one"][0]

    def hold(self, held: Any) -> None:
        self.all["one"][0] = held


class InObject(Scaling):
    """Scaling by a value that is held in an object that a property reads."""

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
    """Scaling by a value that is held in a variable of the function that makes the routine."""

    def set_up(self) -> None:
        """Create the routine, and a method `hold` of this object that sets its variable."""
        scale = self.held

        def hold(value: Any) -> None:
            nonlocal scale
            scale = value

        self.hold = hold  # type: ignore[assignment, method-assign]
        self.scaling_routine = traceable(lambda value: value * scale)

    def routine(self) -> Callable[..., Any]:
        return self.scaling_routine


class InGlobal(Scaling):
    """Scaling by a value that is held in a variable of this module."""

    def set_up(self) -> None:
        self.hold(self.held)

    @traceable
    def scaled(self, value: Any) -> Any:
        return value * SCALE

    def hold(self, held: Any) -> None:
        globals()["SCALE"] = held


class ByName(Scaling):
    """Scaling by a value that is held in an attribute, read by a name that is a constant."""

    @traceable
    def scaled(self, value: Any) -> Any:
        return value * getattr(self, "held")  # noqa: B009


class Hidden(Scaling):
    """Scaling by a value that is held in an attribute, read by a name that is computed."""

    @traceable
    def scaled(self, value: Any) -> Any:
        # No constant of the code is the name, so that no scan of it can find what is read.
        return value * getattr(self, "".join(["he", "ld"]))


class Listed(Scaling):
    """Scaling by the last value of a list to which the routine itself appends."""

    def set_up(self) -> None:
        self.scales: list[Any] = []

    @traceable
    def scaled(self, value: Any) -> Any:
        self.scales.append(self.held)
        return value * self.scales[-1]


class Switched(Scaling):
    """Scaling that changes nothing while it holds 1."""

    @traceable
    def scaled(self, value: Any) -> Any:
        return None if self.held == 1 else value * self.held


class OrderRecorder(Tool):
    """Records the calls of a routine before and one after each op.

    calls: type and number of an op, and "before" or "after".  analysed: numbers of ops, in order.
    """

    def __init__(self, observing: bool) -> None:
        self.calls: list[tuple[str, int, str]] = []
        self.analysed: list[int] = []
        self.observing = observing
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        """Insert a routine before and one after an op that has inputs; number it by the order of analysis."""
        if context.get_inputs():
            name, number = context.get_op_type(), len(self.analysed)
            self.analysed.append(number)
            context.insert_before_op(self.recording_routine(name, number, "before"))
            context.insert_after_op(self.recording_routine(name, number, "after"))

    def recording_routine(self, name: str, number: int, point: str) -> Callable[..., Any]:
        """Return a routine, or an observer, that records its calls."""

        def record(*values: Any) -> None:
            self.calls.append((name, number, point))

        return observer(record) if self.observing else record
