"""Weights that other ops have copied or selected out of parameters before an op reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import amanda
from amanda.tools.mapping import Origins, Slices
from amanda.tools.prune._met import Met
from amanda.tools.prune._reading import Reading
from amanda.tools.prune._rows import Selected
from amanda.tools.prune._weight import Weight

FACTORS = {"matmul": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
SELECTED = "it reads what other ops select out of a parameter, which PyTorch's eager mode alone lets follow"
ELSEWHERE = "what it reads this time is of no parameter, or another tool has changed it before"

Find = Callable[[Any], Weight | Reading | Selected | None]


class Moved:
    """Follows copies and selections of parameters up to the ops that read them as weights."""

    def __init__(self, met: Met) -> None:
        self._met, self._origins, self._slices = met, Origins(), Slices()

    def follow(self, context: amanda.OpContext) -> None:
        """Let an op leave word of what it makes of a parameter."""
        if context.namespace.matches("pytorch"):
            self._origins.follow(context)
        elif context.namespace.matches("tensorflow"):
            self._slices.follow(context)

    def follow_symbols(self, context: amanda.OpContext) -> None:
        """The same for an op of a graph of PyTorch, whose outputs are known."""
        self._origins.follow_symbols(context)

    def weight_index(self, context: amanda.OpContext) -> int | None:
        """Where the weight is: as the mapping says, or the one factor of a product that is moved."""
        index: int | None = context["weight_index"]
        if index is not None:
            return index
        found = [i for i in FACTORS.get(context["type"], ()) if self._is_moved(context, i)]
        return found[0] if len(found) == 1 else None

    def _is_moved(self, context: amanda.OpContext, index: int) -> bool:
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            return self._origins.of(value) is not None or self._origins.is_selected(value)
        chosen = context["weight_index"] is not None
        return context.namespace.matches("tensorflow") and self._slices.reads(context, index, chosen)

    def leaves(self, context: amanda.OpContext, index: int) -> bool:
        """Whether the weight of an op stays as it is, since nothing tells which one it is: that is noted."""
        if context.get_variable(index) is not None or not self._is_moved(context, index):
            return False
        if context.namespace.matches("pytorch/*/eager"):
            return False
        if self._met.selects(context):
            self._met.leave(context, SELECTED)
        return True

    def finder(self, context: amanda.OpContext, index: int) -> Find | None:
        """What gives the weight of which an op reads a copy or a selection; None for any other op."""
        if not context.namespace.matches("pytorch/*/eager") or context.get_variable(index) is not None:
            return None
        if not self._is_moved(context, index):
            return None
        return partial(self._find, context, _layout(context, index))

    def _find(
        self, context: amanda.OpContext, layout: str | None, value: Any
    ) -> Weight | Reading | Selected | None:
        origin = self._origins.of(value)
        if origin is None:
            self._met.leave(context, ELSEWHERE)
            return None
        if origin.form is not None:
            return self._met(context, origin.holder.detach().as_strided(*origin.form), origin.holder, layout)
        rows = self._met.rows(context, origin, value, layout)
        return None if rows is None else Selected(rows, origin)


def _layout(context: amanda.OpContext, index: int) -> str | None:
    """The layout of a weight, or of each in a batch of them."""
    if context["type"] in FACTORS:
        return ("OI", "IO")[FACTORS[context["type"]].index(index)]
    layout: str | None = context["weight_layout"]
    return layout
