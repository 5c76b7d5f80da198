"""What traceable routines have read for the graphs of some code: graphs are made again where it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._reads import Reads, is_same

if TYPE_CHECKING:
    from amanda.backend import Action

    from ._ops import Program


class History:
    """Of one code's graphs.

    limit: what has had that many values is restless; graphs are not made again for it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[tuple[int, Any], list[Any]] = {}
        self._known: list[Reads] = []  # whose holders keep their ids

    def take(self, program: Program) -> Reads:
        """What the routines of a graph read, as it is now; what a graph does not follow is reported."""
        reads = program.reads
        reads.settle()
        tools = ", ".join(dict.fromkeys(type(action.tool).__name__ for action, _ in program.traced))
        if reads.written:
            names = ", ".join(reads.written)
            program.report(f"traceable routines of {tools}", f"they set {names}; a compiled graph does not")
        for action, tensors in program.traced:
            if any(tensor not in reads for tensor in tensors):
                program.report(
                    f"traceable {action}",
                    "it holds a tensor that no name in its code leads to: another in its place is not seen",
                )
        self._known.append(reads)
        for place in reads:
            values = self._values.setdefault(place.key, [])
            if not any(is_same(place.value, one) for one in values):
                values.append(place.value)
        return reads

    def restless(self, action: Action) -> str:
        """The name of what an action reads that is restless; "" where there is none."""
        often = {key for key, values in self._values.items() if len(values) >= self._limit}
        if not often:
            return ""
        reads = Reads()
        reads.follow(action)
        return next((reads.name_of(place) for place in reads if place.key in often), "")
