"""Weights that other ops have copied or selected out of parameters before an op reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.mapping._origins import Origin, Origins
from amanda.tools.mapping._parts import form_of, may_vary
from amanda.tools.mapping._slices import Slices
from amanda.tools.mapping._standard import StandardMapping

FACTORS = {"matmul": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Of the words of products: where their factors are."""

_ORIGIN = "amanda.tools.mapping: origin of the weight"


class Moved(amanda.Tool):
    """Follows copies and selections of parameters up to the ops that read them as weights.

    The tools that depend on it ask it of their ops.  They share one, `MOVED`, whose routines come before
    theirs: what one of them makes of a weight, another could not tell from where it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origins, self._slices = Origins(), Slices()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._follow)
        self.add_inst_for_op(self.origins.follow_symbols, require_outputs=True)

    def scope_left(self) -> None:
        """Forget what is freed."""
        self.origins.sweep()

    def _follow(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        if context.namespace.matches("pytorch"):
            self.origins.follow(context)
            index = self.weight_index(context)
            if index is not None and self.is_told(context, index):
                context.insert_before_op(self._tell, inputs=[index])
        elif context.namespace.matches("tensorflow"):
            self._slices.follow(context)

    @amanda.differentiable  # to be given what is a view of a parameter as that
    def _tell(self, value: Any, run: dict[str, Any]) -> None:
        run[_ORIGIN] = self.origins.source(value)

    def is_told(self, context: amanda.OpContext, index: int) -> bool:
        """Whether each execution says of which part of a parameter the weight is, to `origin`."""
        if not context.namespace.matches("pytorch/*/eager"):
            return False
        if context.get_variable(index) is None:
            return self.origins.of(context.get_inputs()[index]) is not None
        return may_vary(context, index)

    def is_part_in_graph(self, context: amanda.OpContext, index: int) -> bool:
        """Whether an op of a graph of PyTorch reads a part of a parameter, which is always the same."""
        if not context.namespace.matches("pytorch/*/graph") or context.is_static():
            return False
        variable = context.get_variable(index)
        return variable is not None and context.get_inputs()[index].numel() < variable.numel()

    def source(self, context: amanda.OpContext, index: int) -> Origin | None:
        """What the weight is of a parameter, during analysis."""
        value = context.get_inputs()[index]
        if not self.is_part_in_graph(context, index):
            return self.origins.source(value)
        return Origin(context.get_variable(index), _unknown, form_of(value))

    def origin(self, run: Mapping[str, Any]) -> Origin | None:
        """What the weight was before any tool, by the dict that a routine gets; None of a computed one."""
        found: Origin | None = run.get(_ORIGIN)
        return found

    def __reduce__(self) -> str:
        return "MOVED"

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
        """Whether other elements of a parameter may be selected next time for an input that is moved."""
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            origin = self.origins.of(value)
            if origin is None:
                return self.origins.is_selected(value)
            return origin.form is None
        return context.namespace.matches("tensorflow") and self._slices.reads(context, index, chosen=True)


def _unknown(whole: Any) -> Any:
    raise AmandaError("what a graph reads of a tensor is known when it runs")


MOVED = Moved()
"""The one that tools share, so that its routines come before those of them all."""
