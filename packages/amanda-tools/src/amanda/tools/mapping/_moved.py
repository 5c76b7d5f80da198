"""Weights that other ops have copied or selected out of parameters before an op reads them."""

from __future__ import annotations

import amanda
from amanda.tools.mapping._origins import Origins
from amanda.tools.mapping._slices import Slices
from amanda.tools.mapping._standard import StandardMapping

FACTORS = {"matmul": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Of the words of products: where their factors are."""


class Moved(amanda.Tool):
    """Follows copies and selections of parameters up to the ops that read them as weights.

    The tools that depend on it ask it of their ops.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origins, self._slices = Origins(), Slices()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._follow)
        self.add_inst_for_op(self.origins.follow_symbols, require_outputs=True)

    def _follow(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        if context.namespace.matches("pytorch"):
            self.origins.follow(context)
        elif context.namespace.matches("tensorflow"):
            self._slices.follow(context)

    def weight_index(self, context: amanda.OpContext) -> int | None:
        """Where the weight is: as the mapping says, or the one factor of a product that is moved."""
        index: int | None = context["weight_index"]
        if index is not None:
            return index
        found = [i for i in FACTORS.get(context["type"], ()) if self.is_moved(context, i)]
        return found[0] if len(found) == 1 else None

    def weight_layout(self, context: amanda.OpContext, index: int) -> str | None:
        """The layout of the weight there, or of each in a batch; None where axes have no fixed meaning."""
        if context["weight_index"] is None and context["type"] in FACTORS:
            return ("OI", "IO")[FACTORS[context["type"]].index(index)]
        layout: str | None = context["weight_layout"]
        return layout

    def is_moved(self, context: amanda.OpContext, index: int) -> bool:
        """Whether an input was copied or selected out of a parameter, and is none itself or a view of one."""
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            return self.origins.of(value) is not None or self.origins.is_selected(value)
        chosen = context["weight_index"] is not None
        return context.namespace.matches("tensorflow") and self._slices.reads(context, index, chosen)

    def varies(self, context: amanda.OpContext, index: int) -> bool:
        """Whether an input that is moved may be of other elements of the parameter next time."""
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            origin = self.origins.of(value)
            if origin is None:
                return self.origins.is_selected(value)
            return origin.form is None or value.numel() < origin.holder.numel()
        return context.namespace.matches("tensorflow") and self._slices.reads(context, index, chosen=True)
