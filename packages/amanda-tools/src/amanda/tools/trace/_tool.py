"""The tool: brings ops and the tensors at them to the recorder, and shows the graph to other tools."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import amanda
from amanda.options import PositiveInt, checked
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.trace._attributes import plain
from amanda.tools.trace._following import Following
from amanda.tools.trace._graph import Graph, Op, Tensor
from amanda.tools.trace._recorder import ProgramOp, Recorder
from amanda.tools.trace._result import TraceResult
from amanda.tools.trace._values import values_of


class TraceTool(amanda.Tool):
    """Records the graph of what its scopes execute: ops, forward and backward, and tensors between them.

    executions: an op that is executed again with inputs that other ops have made is an op of its own, up to
    so many; further ones are counted at the last.  backward: whether backward ops are recorded.  limit: of
    ops; more are counted, and not recorded.  attributes: whether ops keep their arguments that are no
    tensors.  count: whether executions are counted in graphs too, where that takes a routine at each op.
    `result` has the graph, `clear` starts anew.

    A tool that depends on it finds `context["graph"]`, a `GraphSoFar`.
    """

    is_copied_when_used = False

    @checked
    def __init__(
        self,
        executions: PositiveInt = 8,
        backward: bool = True,
        limit: PositiveInt = 100_000,
        attributes: bool = True,
        count: bool = False,
    ) -> None:
        super().__init__()
        self._executions, self._limit, self._attributes, self._count = executions, limit, attributes, count
        self.clear()
        self.depends_on(StandardMapping(), MappingTool([["*", self._add_graph]]))
        self.add_inst_for_op(self._before)
        self.add_closing_inst_for_op(self._after, require_outputs=True)
        if backward:
            self.add_inst_for_op(self._before, backward=True)
            self.add_closing_inst_for_op(self._after, backward=True, require_outputs=True)

    @property
    def result(self) -> TraceResult:
        """Return the graph so far, as a table and in its forms."""
        return TraceResult(self.graph)

    @property
    def graph(self) -> Graph:
        """Return the graph so far."""
        return self.recorder.graph()

    def clear(self) -> None:
        """Forget the graph; ops are analysed anew."""
        self.load_state_dict({})
        self.recorder = Recorder(self._executions, self._limit)
        self._followings: dict[str, Following] = {}
        self._places: dict[Hashable, ProgramOp] = {}

    def _add_graph(self, context: amanda.OpContext) -> None:
        context["graph"] = GraphSoFar(self)

    def _before(self, context: amanda.OpContext) -> None:
        place, following = self.place_of(context), self.following(context)
        if place.symbolic:
            return
        if context.is_forward():
            context.insert_before_op(following.enter, place=place)
            return
        if following.values.next_number() is None:
            context.insert_before_backward_op(self._resume_execution, grad_outputs=[], place=place)
        context.insert_before_backward_op(following.enter_backward, place=place)

    def _after(self, context: amanda.OpContext) -> None:
        place, following = self.place_of(context), self.following(context)
        if place.symbolic:
            following.add_symbols(context, place)
            if self._count:
                insert = context.insert_after_op if context.is_forward() else context.insert_after_backward_op
                insert(self._count_execution, [], place=place)
        elif context.is_backward():
            context.insert_after_backward_op(following.leave_backward, place=place)
        else:
            context.insert_after_op(following.leave, place=place)
            if following.values.next_number() is None:
                context.insert_after_op(self._keep_execution, outputs=[], place=place)

    @amanda.observer
    def _count_execution(self, place: ProgramOp) -> None:
        for index in place.ops[-1:]:
            self.recorder.count(index)

    @staticmethod
    @amanda.observer
    def _keep_execution(place: ProgramOp, run: dict[str, Any]) -> None:
        run["traced"] = place.last

    @staticmethod
    @amanda.observer
    def _resume_execution(place: ProgramOp, run: dict[str, Any]) -> None:
        place.resumed = run.get("traced")

    def following(self, context: amanda.OpContext) -> Following:
        """Return the object that follows the tensors of a context's framework."""
        framework = context.namespace[0]
        if framework not in self._followings:
            values = values_of(framework, context["shape"], context["dtype"])
            self._followings[framework] = Following(values, self.recorder)
        return self._followings[framework]

    def place_of(self, context: amanda.OpContext) -> ProgramOp:
        """Return the place of a context's op."""
        key = context.get_op_id(), context.get_backward_op_id()
        place = self._places.get(key)
        if place is None:
            place = self._new_place(context)
            if not self.recorder.is_full:
                self._places[key] = place
        return place

    def _new_place(self, context: amanda.OpContext) -> ProgramOp:
        values, backward = self.following(context).values, context.is_backward()
        facts = values.facts(context)
        op = Op(
            -1, context.get_op_id(), context["phase"], context["backward_type" if backward else "type"],
            facts.name, -1, context.get_scope(), context.get_source(), (), (),
            in_place=context["in_place"] and not backward,
            attributes=plain(context.get_attrs()) if self._attributes and not backward else None,
        )  # fmt: skip
        forward = self._places.get((context.get_op_id(), None)) if backward else None
        return ProgramOp(op, facts, str(context.namespace), values.is_symbolic(context), forward)


class GraphSoFar:
    """The graph that led to an op; the op itself is in it once it has been executed."""

    def __init__(self, tool: TraceTool) -> None:
        self._tool = tool

    @property
    def graph(self) -> Graph:
        """Return all that was recorded."""
        return self._tool.graph

    def inputs(self, context: amanda.OpContext) -> tuple[Tensor, ...]:
        """Return the recorded tensors that the op of a context is given; of a backward op the gradients."""
        given = self._tool.following(context).given(context)
        return tuple(map(self._tool.recorder.tensor, dict.fromkeys(given)))

    def producers(self, context: amanda.OpContext) -> tuple[Op, ...]:
        """Return the ops that made what the op of a context is given."""
        return self.ancestors(context, 1)

    def ancestors(self, context: amanda.OpContext, distance: int | None = None) -> tuple[Op, ...]:
        """Return the producers, their producers and so on, the nearest first, each once.

        distance: over how many tensors at most; None for all.
        """
        recorder, found = self._tool.recorder, dict[int, Op]()
        makers = dict.fromkeys(tensor.producer for tensor in self.inputs(context))
        level = [recorder.op(index) for index in makers if index is not None]
        while level and distance != 0:
            found.update({op.index: op for op in level})
            distance = None if distance is None else distance - 1
            above = (one for op in level for one in recorder.producers(op)) if distance != 0 else ()
            level = [*{one.index: one for one in above if one.index not in found}.values()]
        return tuple(found.values())

    def op(self, context: amanda.OpContext) -> Op | None:
        """Return the recorded op of a context; None before its first execution."""
        executed = self._tool.place_of(context).ops
        return self._tool.recorder.op(executed[-1]) if executed else None
