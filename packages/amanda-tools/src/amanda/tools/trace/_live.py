"""The graph for tools that depend on the tracing one, in their analyses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amanda.tools.trace._graph import Graph, Op, Tensor

if TYPE_CHECKING:
    import amanda
    from amanda.tools.trace._tool import TraceTool


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
