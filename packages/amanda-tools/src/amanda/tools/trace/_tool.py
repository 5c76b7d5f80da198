"""The tool: records ops and tensors, and gives the graph to other tools."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import amanda
from amanda.action import BackwardRepeatObserver, RepeatObserver
from amanda.options import PositiveInt, checked
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.select import SelectOptions, select
from amanda.tools.trace._graph import UNRECORDED, Graph, GraphRecorder, Op, ProgramOp, Tensor
from amanda.tools.trace._result import TraceResult
from amanda.tools.trace._tracker import ExecutionTracker
from amanda.tools.trace._values import values_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TraceTool(amanda.Tool):
    """Record the graph of the executed ops, forward and backward, and the tensors between them.

    Tools that depend on TraceTool read `context["graph"]`, a `GraphSoFar`.  `clear` begins a new graph.

    Args:
        executions: Most ops for one place in the program; an execution with inputs from other ops is a new
            op, and further executions are counted at the last op.
        backward: Record backward ops.
        limit: Most ops; further ops are counted, not recorded.
        attributes: Record arguments that are not tensors.
        count: Count executions in graphs too, at the cost of a routine for each op.
        **selection: Options of `select`, such as module="encoder".
    """

    purpose = "look"
    is_copied_when_used = False

    @checked
    def __init__(
        self, executions: PositiveInt = 8, backward: bool = True, limit: PositiveInt = 100_000,
        attributes: bool = True, count: bool = False, **selection: Unpack[SelectOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        self._executions, self._limit = executions, limit
        self._records_attributes, self._counts_executions = attributes, count
        self.clear()
        self._graph_so_far = GraphSoFar(self)
        # A rule, so that tools that depend on this one find the graph when they analyse an op.
        self.depends_on(StandardMapping(), MappingTool([["*", self._add_graph]]))
        # Closing: tools that depend on this one read the graph before the op is in it.
        self.add_inst_for_op(self._instrument_before)
        self.add_closing_inst_for_op(self._instrument_after, require_outputs=True)
        if backward:
            self.add_inst_for_op(self._instrument_before, backward=True)
            self.add_closing_inst_for_op(self._instrument_after, backward=True, require_outputs=True)
        select(self, **selection)

    @property
    def result(self) -> TraceResult:
        """Return the graph so far, as a table."""
        return TraceResult(self.graph)._of_tool(self)

    @property
    def graph(self) -> Graph:
        """Return the graph so far."""
        return self.recorder.graph()

    def clear(self) -> None:
        """Drop the graph; ops are analysed again."""
        # Plans are dropped with it: their routines hold the records of the old graph.
        self.load_state_dict({})
        self.recorder = GraphRecorder(self._executions, self._limit)
        self._tracker_by_framework: dict[str, ExecutionTracker] = {}
        self._program_op_by_ids: dict[Hashable, ProgramOp] = {}

    def _add_graph(self, context: amanda.OpContext) -> None:
        context["graph"] = self._graph_so_far

    def _instrument_before(self, context: amanda.OpContext) -> None:
        """Insert the routines that record the inputs of an op."""
        program_op, tracker = self.place_of(context), self.tracker(context)
        # Symbols have no values at execution: the op is recorded once, when its outputs are known.
        if program_op.symbolic:
            return
        if context.is_forward():
            observer = RepeatObserver(tracker.before_op, program_op.records)
            context.insert_before_op(observer, program_op=program_op)
            return
        # Without numbers of nodes the framework's `run` leads from a forward execution to its backward ops.
        gradients = tracker.values.gradients
        if gradients is None:
            context.insert_before_backward_op(self._resume_execution, grad_outputs=[], program_op=program_op)
            context.insert_before_backward_op(tracker.before_backward_op, program_op=program_op)
            return
        before = BackwardRepeatObserver(tracker.before_backward_op, program_op.records, gradients)
        context.insert_before_backward_op(before, program_op=program_op)

    def _instrument_after(self, context: amanda.OpContext) -> None:
        """Insert the routines that record the outputs of an op; record symbols at once."""
        program_op, tracker = self.place_of(context), self.tracker(context)
        if program_op.symbolic:
            tracker.add_symbols(context, program_op)
            if self._counts_executions:
                insert = context.insert_after_op if context.is_forward() else context.insert_after_backward_op
                insert(self._count_execution, [], program_op=program_op)
        elif context.is_backward():
            routine: Any = tracker.after_backward_op
            if (gradients := tracker.values.gradients) is not None:
                routine = BackwardRepeatObserver(routine, program_op.records, gradients, after=True)
            context.insert_after_backward_op(routine, program_op=program_op)
        else:
            after = RepeatObserver(tracker.after_op, program_op.records, after=True)
            context.insert_after_op(after, program_op=program_op)
            if tracker.values.next_node_number() is None:
                context.insert_after_op(self._keep_execution, outputs=[], program_op=program_op)

    @amanda.observer
    def _count_execution(self, program_op: ProgramOp) -> None:
        # None is recorded after the limit.
        for index in program_op.ops[-1:]:
            self.recorder.count(index)

    @staticmethod
    @amanda.observer
    def _keep_execution(program_op: ProgramOp, run: dict[str, Any]) -> None:
        """Note the recorded op of an execution, for its backward ops."""
        run["traced"] = program_op.last_executed

    @staticmethod
    @amanda.observer
    def _resume_execution(program_op: ProgramOp, run: dict[str, Any]) -> None:
        """Set the recorded op of a backward op's execution; None if none was recorded."""
        program_op.resumed_forward_op = run.get("traced")

    def tracker(self, context: amanda.OpContext) -> ExecutionTracker:
        """Return the tracker of a context's framework."""
        framework = context.namespace[0]
        if framework not in self._tracker_by_framework:
            values = values_of(framework, context["shape"], context["dtype"])
            self._tracker_by_framework[framework] = ExecutionTracker(values, self.recorder)
        return self._tracker_by_framework[framework]

    def place_of(self, context: amanda.OpContext) -> ProgramOp:
        """Return the ProgramOp of a context's op, or a new one, which is kept unless the graph is full."""
        key = context.get_op_id(), context.get_backward_op_id()
        program_op = self._program_op_by_ids.get(key)
        if program_op is None:
            program_op = self._describe_op(context)
            # A full graph needs no more places, whose number is not bounded otherwise.
            if not self.recorder.is_full:
                self._program_op_by_ids[key] = program_op
        return program_op

    def _describe_op(self, context: amanda.OpContext) -> ProgramOp:
        """Return a new ProgramOp for a context's op, of which nothing is recorded yet."""
        tracker, backward = self.tracker(context), context.is_backward()
        facts, has_attributes = tracker.values.facts(context), self._records_attributes and not backward
        # The recorder sets index, framework, inputs and outputs of each execution.
        op = Op(
            index=UNRECORDED, id=context.get_op_id(), phase=context["phase"],
            type=context["backward_type" if backward else "type"], name=facts.name, framework=UNRECORDED,
            module=context.get_scope(), source=context.get_source(), inputs=(), outputs=(),
            in_place=context["in_place"] and not backward,
            attributes=plain_value(context.get_attrs()) if has_attributes else None,
        )  # fmt: skip
        # None if the forward op was first analysed in another scope.
        forward = self._program_op_by_ids.get((context.get_op_id(), None)) if backward else None
        is_symbolic = tracker.values.is_symbolic(context)
        return ProgramOp(op, facts, str(context.namespace), is_symbolic, forward, tracker.live)


class GraphSoFar:
    """The graph before an op; the op is in the graph after its first execution."""

    def __init__(self, tool: TraceTool) -> None:
        self._tool = tool

    @property
    def graph(self) -> Graph:
        """Return the graph so far."""
        return self._tool.graph

    def inputs(self, context: amanda.OpContext) -> tuple[Tensor, ...]:
        """Return the recorded inputs of a context's op; for a backward op, the gradients."""
        indices = self._tool.tracker(context).current_inputs(context)
        return tuple(map(self._tool.recorder.tensor, dict.fromkeys(indices)))

    def producers(self, context: amanda.OpContext) -> tuple[Op, ...]:
        """Return the ops that made the inputs of a context's op."""
        return self.ancestors(context, 1)

    def ancestors(self, context: amanda.OpContext, distance: int | None = None) -> tuple[Op, ...]:
        """Return the producers, their producers and so on, the nearest first, each once.

        Args:
            context: Context of the op.
            distance: Most tensors between; None for all ancestors.
        """
        recorder, ancestors = self._tool.recorder, dict[int, Op]()
        producers = dict.fromkeys(tensor.producer for tensor in self.inputs(context))
        level = [recorder.op(index) for index in producers if index is not None]
        while level and distance != 0:
            ancestors.update({op.index: op for op in level})
            if distance == 1:
                break
            distance = None if distance is None else distance - 1
            next_level = (producer for op in level for producer in recorder.producers(op))
            level = list({op.index: op for op in next_level if op.index not in ancestors}.values())
        return tuple(ancestors.values())

    def op(self, context: amanda.OpContext) -> Op | None:
        """Return the recorded op of a context; None before its first execution."""
        recorded_ops = self._tool.place_of(context).ops
        return self._tool.recorder.op(recorded_ops[-1]) if recorded_ops else None


_MOST_ITEMS = 64
"""Longest list or dict inside an argument that is recorded item by item."""
_LONGEST_TEXT = 200
"""Characters of a text that is recorded."""


def plain_value(value: Any, depth: int = 0) -> Any:
    """Return a value for JSON: numbers, text, None, short lists and dicts; any other as a short text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        # JSON has no NaN and no infinity, whose difference from themselves is NaN.
        return value if value - value == 0 else str(value)
    if isinstance(value, (list, tuple, Mapping)) and depth <= 4 and (len(value) <= _MOST_ITEMS or not depth):
        if isinstance(value, Mapping):
            return {str(name): plain_value(item, depth + 1) for name, item in value.items()}
        return [plain_value(item, depth + 1) for item in value]
    text = value.decode(errors="replace") if isinstance(value, bytes) else _value_text(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def _value_text(value: Any) -> str:
    """Return a text of a value that is not JSON: of a type its name, of a tensor its dtype and shape."""
    if hasattr(type(value), "as_numpy_dtype"):  # an element type with a long text
        return str(value.name)
    if isinstance(value, type):
        return value.__qualname__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if hasattr(type(value), "nbytes"):  # a storage, whose text has all its elements
        return type(value).__qualname__
    return str(value)
