"""Inputs of ops that are weights, also copied or selected out of parameters by other ops."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import amanda
from amanda.errors import AmandaError
from amanda.tools.mapping import MATRIX_PRODUCTS, StandardMapping
from amanda.tools.weights._input_rows import MultipliedInput, multiplied_input
from amanda.tools.weights._parameter_slices import READS, SLICE, FollowedSlices, ParameterSlice
from amanda.tools.weights._parameters import StridedLayout
from amanda.tools.weights._shared_state import may_vary
from amanda.tools.weights._variable_slices import Slices


@dataclass(frozen=True)
class WeightInput:
    """The input of an op that is its weight.

    index: position among the inputs.  layout: axes of the weight, as StandardMapping's `weight_layout`; of
    each weight where the op reads a batch of them.
    holder: the parameter, or the handle of the variable, that the value was read of; None for others.
    is_followed: True where each execution may read another part of a parameter, or a copy of one: in a
    routine `ParameterSlice.of_execution(run)` tells.
    is_lost: True for a copy or selection that nothing tells of at execution.
    varies: True where the data may select other elements of the parameter at each execution.
    is_part: True for a part of a parameter that `ParameterSlice.of_input` tells; if `is_followed`, the first
    of those to come.
    """

    index: int
    layout: str | None
    holder: Any
    is_followed: bool
    is_lost: bool
    varies: bool
    is_part: bool

    def multiplied_input(self, context: amanda.OpContext) -> MultipliedInput | None:
        """Return the input that the op multiplies by the weight; None where that is not followed."""
        return multiplied_input(context, self.index)


def weight_input(context: amanda.OpContext) -> WeightInput | None:
    """Return the weight input of a forward op; None for an op without a weight.

    Call it in an analysis routine of a tool that depends on StandardMapping and `WeightReads`.
    """
    reads: WeightReads = context[READS]
    return reads.input(context)


class WeightReads(amanda.Tool):
    """Follows copies and selections of parameters up to the ops that read them as weights.

    A tool that calls `weight_input` depends on one.  The first of those that are applied together serves all,
    and its routines come before theirs: of a changed weight nothing tells which parameter it is.
    """

    several_weights: ClassVar[str] = "it multiplies by several weights in one op"
    """Why a tool leaves an op that has more than one weight, such as an LSTM."""
    unknown_part: ClassVar[str] = (
        "the op once read something that is no part of a parameter, or a tool that was applied before has "
        "changed it"
    )
    """Why a tool leaves an op: the part that it reads of a parameter cannot be told."""

    def __init__(self) -> None:
        super().__init__()
        self.origins, self._slices = FollowedSlices(), Slices()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._follow)
        self.add_inst_for_op(self.origins.follow_symbols, require_outputs=True)

    @staticmethod
    def computes_weight(context: amanda.OpContext) -> bool:
        """Return True if an op belongs to a parametrization of PyTorch, which computes a weight."""
        return ".parametrizations." in f".{context.get_scope()}."

    def stands_for(self) -> Hashable:
        """Return a key that all instances share, so that a scope has one of them."""
        return WeightReads

    def scope_left(self) -> None:
        """Forget freed tensors."""
        self.origins.sweep()

    def __reduce__(self) -> Any:
        return WeightReads, ()

    def _follow(self, context: amanda.OpContext) -> None:
        if READS in context:  # a scope around this one follows already
            return
        context[READS] = self
        if context["phase"] != "forward":
            return
        if context.namespace.matches("pytorch"):
            self.origins.follow(context)
            index = self._index(context)
            if index is not None and self._is_followed(context, index):
                context.insert_before_op(self._note_origin, inputs=[index])
        elif context.namespace.matches("tensorflow"):
            self._slices.follow(context)

    @amanda.differentiable  # to be given a view of a parameter as a view
    def _note_origin(self, value: Any, run: dict[str, Any]) -> None:
        run[SLICE] = self.origins.source(value)

    def input(self, context: amanda.OpContext) -> WeightInput | None:
        """Return the weight input of an op; None for an op without a weight."""
        index = self._index(context)
        if index is None:
            return None
        layout: str | None = context["weight_layout"]
        if context["weight_index"] is None and context["type"] in MATRIX_PRODUCTS:
            layout = ("OI", "IO")[MATRIX_PRODUCTS[context["type"]].factors.index(index)]
        holder = context.get_variable(index)
        is_moved = holder is None and self._is_moved(context, index)
        is_followed = self._is_followed(context, index)
        varies = is_moved and not context.is_static() and self._varies(context, index)
        return WeightInput(
            index, layout, holder, is_followed,
            is_lost=is_moved and not context.namespace.matches("pytorch/*/eager"), varies=varies,
            is_part=not varies and (is_followed or _is_part_in_graph(context, index)),
        )  # fmt: skip

    def source(self, context: amanda.OpContext, index: int) -> ParameterSlice | None:
        """Return what an input is of a parameter; None for what was computed."""
        value = context.get_inputs()[index]
        if not _is_part_in_graph(context, index):
            return self.origins.source(value)
        return ParameterSlice(context.get_variable(index), _unknown, StridedLayout.of(value))

    def _index(self, context: amanda.OpContext) -> int | None:
        """Return where the mapping says, or the one factor of a product that was copied or selected."""
        index: int | None = context["weight_index"]
        if index is not None:
            return index
        product = MATRIX_PRODUCTS.get(context["type"])
        found = [i for i in product.factors if self._is_moved(context, i)] if product else []
        return found[0] if len(found) == 1 else None

    def _is_followed(self, context: amanda.OpContext, index: int) -> bool:
        if not context.namespace.matches("pytorch/*/eager"):
            return False
        if context.get_variable(index) is None:
            return self.origins.of(context.get_inputs()[index]) is not None
        return may_vary(context, index)

    def _is_moved(self, context: amanda.OpContext, index: int) -> bool:
        """Return True for an input that was copied or selected out of a parameter, and is no view of it."""
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            return self.origins.of(value) is not None or self.origins.is_selected(value)
        chosen = context["weight_index"] is not None
        return context.namespace.matches("tensorflow") and self._slices.reads(context, index, chosen)

    def _varies(self, context: amanda.OpContext, index: int) -> bool:
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            found = self.origins.of(value)
            return self.origins.is_selected(value) if found is None else found.form is None
        return context.namespace.matches("tensorflow") and self._slices.reads(context, index, chosen=True)


def _is_part_in_graph(context: amanda.OpContext, index: int) -> bool:
    """Return True where an op of a graph of PyTorch reads the same part of a parameter each time."""
    if not context.namespace.matches("pytorch/*/graph") or context.is_static():
        return False
    variable = context.get_variable(index)
    return variable is not None and context.get_inputs()[index].numel() < variable.numel()


def _unknown(whole: Any) -> Any:
    raise AmandaError("the part of a parameter that a graph reads is known only while it runs")
