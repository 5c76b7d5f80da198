"""How often ops of each type were executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches

import amanda
from amanda.tools.mapping import StandardMapping


class Counts(amanda.Tool):
    """Executions by phase and type."""

    def __init__(self) -> None:
        super().__init__()
        self.executions: Counter[tuple[str, str]] = Counter()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def _forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._count, inputs=[], op=("forward", context["type"]))

    def _backward(self, context: amanda.OpContext) -> None:
        op = ("backward", context["backward_type"])
        context.insert_before_backward_op(self._count, grad_outputs=[], op=op)

    @amanda.observer
    def _count(self, op: tuple[str, str]) -> None:
        self.executions[op] += 1

    def of(self, phase: str) -> dict[str, int]:
        """Executions by type."""
        return {kind: count for (its, kind), count in sorted(self.executions.items()) if its == phase}


def difference(wanted: Mapping[str, int], found: Mapping[str, int], exact: bool) -> list[str]:
    """A line for each type whose count is another; with `exact` also for those that are not wanted."""
    lines = []
    for kind in dict.fromkeys([*wanted, *(sorted(found) if exact else ())]):
        if found.get(kind, 0) == wanted.get(kind, 0):
            continue
        near = get_close_matches(kind, [one for one in found if one not in wanted], n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near and kind not in found else ""
        lines.append(f"{kind}: {found.get(kind, 0)} executed, {wanted.get(kind, 0)} expected{hint}")
    return lines
