"""Inputs of ops that are weights, also copied or selected out of parameters and variables by other ops."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import ref

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import leaves
from amanda.tools.mapping import MATRIX_PRODUCTS, TENSORFLOW_PASSES, TENSORFLOW_READS, StandardMapping
from amanda.tools.weights._input_rows import MultipliedInput, multiplied_input
from amanda.tools.weights._parameter_slices import READS, SLICE, FollowedSlices, ParameterSlice
from amanda.tools.weights._parameters import StridedLayout
from amanda.tools.weights._shared_state import may_vary


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
        self.slices, self._variables = FollowedSlices(), VariableSlices()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._follow)
        self.add_inst_for_op(self.slices.follow_symbols, require_outputs=True)

    @staticmethod
    def computes_weight(context: amanda.OpContext) -> bool:
        """Return True if an op belongs to a parametrization of PyTorch, which computes a weight."""
        return ".parametrizations." in f".{context.get_scope()}."

    def stands_for(self) -> Hashable:
        """Return a key that all instances share, so that a scope has one of them."""
        return WeightReads

    def scope_left(self) -> None:
        """Forget freed tensors."""
        self.slices.sweep()

    def __reduce__(self) -> Any:
        return WeightReads, ()

    def _follow(self, context: amanda.OpContext) -> None:
        if READS in context:  # a scope around this one follows already
            return
        context[READS] = self
        if context["phase"] != "forward":
            return
        if context.namespace.matches("pytorch"):
            self.slices.follow(context)
            index = self._index(context)
            if index is not None and self._is_followed(context, index):
                context.insert_before_op(self._record_slice, inputs=[index])
        elif context.namespace.matches("tensorflow"):
            self._variables.follow(context)

    @amanda.differentiable  # to be given a view of a parameter as a view
    def _record_slice(self, value: Any, run: dict[str, Any]) -> None:
        run[SLICE] = self.slices.source(value)

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
            return self.slices.source(value)
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
            return self.slices.of(context.get_inputs()[index]) is not None
        return may_vary(context, index)

    def _is_moved(self, context: amanda.OpContext, index: int) -> bool:
        """Return True for an input that was copied or selected out of a parameter, and is no view of it."""
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            return self.slices.of(value) is not None or self.slices.is_selected(value)
        chosen = context["weight_index"] is not None
        return context.namespace.matches("tensorflow") and self._variables.reads(context, index, chosen)

    def _varies(self, context: amanda.OpContext, index: int) -> bool:
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            found = self.slices.of(value)
            return self.slices.is_selected(value) if found is None else found.form is None
        return context.namespace.matches("tensorflow") and self._variables.reads(context, index, chosen=True)


def _is_part_in_graph(context: amanda.OpContext, index: int) -> bool:
    """Return True where an op of a graph of PyTorch reads the same part of a parameter each time."""
    if not context.namespace.matches("pytorch/*/graph") or context.is_static():
        return False
    variable = context.get_variable(index)
    return variable is not None and context.get_inputs()[index].numel() < variable.numel()


def _unknown(whole: Any) -> Any:
    raise AmandaError("the part of a parameter that a graph reads is known only while it runs")


_PASSES = TENSORFLOW_PASSES | {"Squeeze", "ExpandDims"}
_SELECTS = frozenset({
    "StridedSlice", "Slice", "Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd", "Split",
    "SplitV", "Unpack",
})  # fmt: skip
"""Types that give elements of an input that other inputs choose."""
_VALUE_AT = {"Split": 1}
_FIXED = frozenset({"Split", "SplitV", "Unpack"})  # the program says which of the parts it takes


class VariableSlices:
    """Tensors that ops have selected out of variables.

    In eager mode a routine follows each execution; a graph tells by itself, and which are always the same.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, bool]] = {}

    def follow(self, context: amanda.OpContext) -> None:
        """Record the elements of a variable that an op selects; call this in a forward analysis routine."""
        name = context.get_op_type()
        if name not in _SELECTS | _PASSES or not context.namespace.matches("tensorflow/*/eager"):
            return
        inputs = context.get_inputs()
        held = name in _SELECTS and any(context.get_variable(i) is not None for i in range(len(inputs)))
        made = [known for one in inputs if (known := self._known(one)) is not None]
        if held or made:
            chosen = name in _SELECTS - _FIXED or any(chosen for _, chosen in made)
            context.insert_after_op(self._note, chosen=chosen)

    def reads(self, context: amanda.OpContext, index: int, chosen: bool) -> bool:
        """Return True if an input of an op was selected out of a variable.

        chosen: whether the data have to choose it, as indices may in eager mode.
        """
        value = context.get_inputs()[index]
        known = self._known(value)
        return (known[1] or not chosen) if known is not None else _is_selected(value, chosen)

    def _known(self, value: Any) -> tuple[Any, bool] | None:
        known = self._made.get(id(value))
        return known if known is not None and known[0]() is value else None

    def _note(self, *made: Any, chosen: bool) -> None:
        for tensor in leaves(made):
            self._made[id(tensor)] = ref(tensor, partial(self._forget, id(tensor))), chosen

    def _forget(self, key: int, _: Any) -> None:
        self._made.pop(key, None)


def _is_selected(symbol: Any, chosen: bool) -> bool:
    """Return True if a symbol of a graph was selected out of a variable; with `chosen`, by the data."""
    selects = False
    while True:
        try:
            op = symbol.op
        except AttributeError:  # an eager tensor has none
            return False
        if op.type in TENSORFLOW_READS or (op.inputs and _is_handle(op.inputs[0])):
            return selects or op.type in _SELECTS
        if op.type not in _SELECTS | _PASSES or not op.inputs:
            return False
        at = _VALUE_AT.get(op.type, 0)
        if op.type in _SELECTS and not selects:
            selects = not (chosen and _is_constant([one for i, one in enumerate(op.inputs) if i != at]))
        symbol = op.inputs[at]


def _is_handle(symbol: Any) -> bool:
    return str(getattr(symbol.dtype, "name", "")) == "resource"


def _is_constant(symbols: Any) -> bool:
    import tensorflow as tf

    return all(tf.get_static_value(one) is not None for one in symbols)
