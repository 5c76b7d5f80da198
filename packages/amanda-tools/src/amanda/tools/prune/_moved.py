"""The weights of ops that read what was copied or selected out of parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import amanda
from amanda.tools.mapping import MOVED, Origin
from amanda.tools.prune._met import Met
from amanda.tools.prune._reading import Reading
from amanda.tools.prune._rows import Selected
from amanda.tools.prune._weight import Weight

SELECTED = "it reads what other ops select out of a parameter, which PyTorch's eager mode alone lets follow"
ELSEWHERE = "what it reads this time is of no parameter, or a tool that was applied before has changed it"

Find = Callable[[Any, Origin | None], Weight | Reading | Selected | None]
"""Gives the weight that is read, of a value and what it was before any tool."""


class MovedWeights:
    """Finds which weights those are, in each execution anew; or notes that they are left."""

    def __init__(self, met: Met) -> None:
        self._met, self._moved = met, MOVED

    def weight_index(self, context: amanda.OpContext) -> int | None:
        """Where the weight is, moved or not."""
        return self._moved.weight_index(context)

    def leaves(self, context: amanda.OpContext, index: int) -> bool:
        """Whether the weight of an op stays as it is, since nothing tells which one it is: that is noted."""
        if context.get_variable(index) is not None or not self._moved.is_moved(context, index):
            return False
        if context.namespace.matches("pytorch/*/eager"):
            return False
        if self._met.selects(context):
            self._met.leave(context, SELECTED)
        return True

    def finder(self, context: amanda.OpContext, index: int) -> Find | None:
        """What gives the weight that an op reads this time; None for an op that always reads the same."""
        if not self._moved.is_told(context, index):
            return None
        return partial(self._find, context, self._moved.weight_layout(context, index))

    def _find(
        self, context: amanda.OpContext, layout: str | None, value: Any, origin: Origin | None
    ) -> Weight | Reading | Selected | None:
        if origin is None:
            self._met.leave(context, ELSEWHERE)
            return None
        if origin.form is not None:
            view = origin.holder.detach().as_strided(*origin.form)
            return self._met(context, view, origin.holder, layout)
        rows = self._met.rows(context, origin, value, layout)
        return None if rows is None else Selected(rows, origin)
