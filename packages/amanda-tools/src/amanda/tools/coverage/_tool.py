"""The tool: follows ops and the calls of modules that they belong to."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from threading import get_ident
from types import FrameType
from typing import Any

import amanda
from amanda.tools.coverage._calls import KERAS, TORCH, Call, Modules, Span
from amanda.tools.coverage._result import CoverageResult, OpCoverage
from amanda.tools.mapping import MappingTool, StandardMapping


class CoverageTool(amanda.Tool):
    """Counts what is executed in its scopes, and how much of it hooks at leaf modules would have seen.

    `result` tells, `clear` starts anew.  A forward op is seen whole where it is all that the call of a leaf
    module (one without modules in it) consists of: the pre-hook has its inputs and the hook its outputs.  Of
    several the first is entered in sight and the last is left so.  A backward op is seen where it is the only
    one of such a call, since full backward hooks have the gradients of a module's outputs and inputs; what
    adds gradients up in parameters never is.  Where a graph runs there are no modules any more, and name
    scopes that have none within stand for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, OpCoverage] = {}
        self._in_graphs: dict[int, OpCoverage] = {}
        self._calls: dict[int, tuple[FrameType, Call]] = {}
        self._number = 0
        modules = [["pytorch", TORCH.describe], ["tensorflow/*/eager", KERAS.describe]]
        self.depends_on(StandardMapping(), MappingTool(modules))
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    @property
    def result(self) -> CoverageResult:
        """The counts of what was executed so far."""
        self._calls.clear()
        _see_scopes(self._in_graphs.values())
        return CoverageResult([*self._places.values(), *self._in_graphs.values()])

    def clear(self) -> None:
        """Forget what was executed; what was analysed stays."""
        self._calls.clear()
        self._number += 1
        for place in (*self._places.values(), *self._in_graphs.values()):
            place.calls = place.whole = place.entered = place.left = 0

    def _forward(self, context: amanda.OpContext) -> None:
        modules: Modules | None = context.get("modules")
        context["model"] = modules.outermost_class(sys._getframe()) if modules else ""
        place = self._place(context, context.get_op_id(), "forward", context["type"])
        if modules:
            context.insert_before_op(self._enter, inputs=[], place=place, modules=modules)
        else:
            context.insert_before_op(self._count, inputs=[], place=place)

    def _backward(self, context: amanda.OpContext) -> None:
        place = self._place(context, context.get_backward_op_id() or 0, "backward", context["backward_type"])
        if context.get("modules") and place.type != "accumulate_grad":
            context.insert_before_backward_op(self._enter_backward, grad_outputs=[], place=place)
        else:
            context.insert_before_backward_op(self._count, grad_outputs=[], place=place)

    def _place(self, context: amanda.OpContext, op: int, phase: str, kind: str) -> OpCoverage:
        places = self._places if context.get("modules") else self._in_graphs
        if op not in places:
            where = (context.get_scope(), context.get_source(), context.get("model", ""))
            places[op] = OpCoverage(phase, kind, *where)
        return places[op]

    @staticmethod
    @amanda.observer
    def _count(place: OpCoverage) -> None:
        place.calls += 1

    @amanda.observer
    def _enter(self, place: OpCoverage, modules: Modules, run: dict[str, Any]) -> None:
        place.calls += 1
        frame = modules.innermost(sys._getframe(1))
        if frame is None:
            self._calls.pop(get_ident(), None)  # a frame holds on to what its call was given
            return
        last = self._calls.get(get_ident())
        if last is None or last[0] is not frame:
            last = self._calls[get_ident()] = (frame, modules.call(frame, self._number))
        call = run["call"] = last[1]
        if call.leaf:
            call.forward.add(place)

    @amanda.observer
    def _enter_backward(self, place: OpCoverage, run: dict[str, Any]) -> None:
        place.calls += 1
        call: Call | None = run.get("call")
        if call is not None and call.leaf and call.number == self._number:
            call.backward.add(place)


def _see_scopes(places: Iterable[OpCoverage]) -> None:
    """Record which ops in graphs are seen, from how many there are in each name scope."""
    groups: dict[tuple[str, str], list[OpCoverage]] = {}
    for place in places:
        place.whole = place.entered = place.left = 0
        if place.calls and place.module and place.type != "accumulate_grad":
            groups.setdefault((place.phase, place.module), []).append(place)
    scopes = {scope for _, scope in groups}
    parents = {scope[:i] for scope in scopes for i, letter in enumerate(scope) if letter in "/."}
    for (_, scope), members in groups.items():
        if scope in parents:
            continue
        span = Span()
        for place in members:
            span.add(place)
        for place in members:
            place.whole, place.entered, place.left = (
                min(seen, 1) * place.calls for seen in (place.whole, place.entered, place.left)
            )
