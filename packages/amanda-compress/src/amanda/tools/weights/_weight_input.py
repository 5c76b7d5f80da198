"""Weight inputs of ops, also copies and selections of parameters, and the inputs that they multiply."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, NamedTuple
from weakref import ref

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import leaves, tensors_of, windows_of
from amanda.tools.libraries import do, shape
from amanda.tools.mapping import (
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    TENSORFLOW_PASSES,
    TENSORFLOW_READS,
    StandardMapping,
    are_transposed,
    product_of,
    spatial_axes,
)
from amanda.tools.weights._parameter_slices import READS, SLICE, FollowedSlices, ParameterSlice, may_vary
from amanda.tools.weights._parameters import StridedLayout


@dataclass(frozen=True)
class WeightInput:
    """The input of an op that is its weight.

    index: position among the inputs.  layout: axes of the weight, as StandardMapping's `weight_layout`; of
    each weight where the op reads a batch of them.
    holder: the parameter, or the handle of the variable, that holds the value; None for a computed value.
    is_followed: True if each execution may read another part of a parameter, or a copy of a part;
    `ParameterSlice.of_execution(run)` returns the part in a routine.
    is_lost: True for a copy or selection that cannot be followed at execution.
    varies: True if the data may select other elements of the parameter at each execution.
    is_part: True for a part of a parameter that `ParameterSlice.of_input` returns; if `is_followed`, the part
    of the first execution.
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
    """Follow copies and selections of parameters up to the ops that read them as weights.

    A tool that calls `weight_input` depends on this tool.  One instance serves all tools of a scope, and its
    routines run before theirs: once a tool has changed a weight, its parameter cannot be identified.
    """

    several_weights: ClassVar[str] = "it multiplies by several weights in one op"
    """Reason for skipping an op with more than one weight, such as an LSTM."""
    unknown_part: ClassVar[str] = (
        "the op once read something that is no part of a parameter, or a tool that was applied before has "
        "changed it"
    )
    """Reason for skipping an op whose part of a parameter is unknown."""

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
        """Follow the op's copies of parameters, and record the slice that each execution reads as weight."""
        if READS in context:  # a scope around this one follows already
            return
        context[READS] = self
        if context["phase"] != "forward":
            return
        if context.namespace.matches("pytorch"):
            self.slices.follow(context)
            index = self._weight_position(context)
            if index is not None and self._is_followed(context, index):
                context.insert_before_op(self._record_slice, inputs=[index])
        elif context.namespace.matches("tensorflow"):
            self._variables.follow(context)

    @amanda.differentiable  # to be given a view of a parameter as a view
    def _record_slice(self, value: Any, run: dict[str, Any]) -> None:
        run[SLICE] = self.slices.source(value)

    def input(self, context: amanda.OpContext) -> WeightInput | None:
        """Return the weight input of an op; None for an op without a weight."""
        index = self._weight_position(context)
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
        """Return the slice of a parameter that an input is; None for a computed value."""
        value = context.get_inputs()[index]
        if not _is_part_in_graph(context, index):
            return self.slices.source(value)
        return ParameterSlice(context.get_variable(index), _raise_unknown_part, StridedLayout.of(value))

    def _weight_position(self, context: amanda.OpContext) -> int | None:
        """Return `weight_index`, else the position of the only copied or selected factor; None without."""
        index: int | None = context["weight_index"]
        if index is not None:
            return index
        product = MATRIX_PRODUCTS.get(context["type"])
        positions = [i for i in product.factors if self._is_moved(context, i)] if product else []
        return positions[0] if len(positions) == 1 else None

    def _is_followed(self, context: amanda.OpContext, index: int) -> bool:
        """Return True if each execution of an eager op may read another part of a parameter."""
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
        by_data = context["weight_index"] is not None
        return context.namespace.matches("tensorflow") and self._variables.reads(context, index, by_data)

    def _varies(self, context: amanda.OpContext, index: int) -> bool:
        """Return True if the data select the elements of a parameter that an op reads."""
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            parameter_slice = self.slices.of(value)
            return self.slices.is_selected(value) if parameter_slice is None else parameter_slice.form is None
        return context.namespace.matches("tensorflow") and self._variables.reads(context, index, by_data=True)


def _is_part_in_graph(context: amanda.OpContext, index: int) -> bool:
    """Return True where an op of a graph of PyTorch reads the same part of a parameter each time."""
    if not context.namespace.matches("pytorch/*/graph") or context.is_static():
        return False
    variable = context.get_variable(index)
    return variable is not None and context.get_inputs()[index].numel() < variable.numel()


def _raise_unknown_part(whole: Any) -> Any:
    raise AmandaError("the part of a parameter that a graph reads is known only while it runs")


_PASSED = TENSORFLOW_PASSES | {"Squeeze", "ExpandDims"}
_SELECTIONS = frozenset({
    "StridedSlice", "Slice", "Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd", "Split",
    "SplitV", "Unpack",
})  # fmt: skip
"""Types of ops that select elements of an input by other inputs."""
_VALUE_POSITIONS = {"Split": 1}
_FIXED_SELECTIONS = frozenset({"Split", "SplitV", "Unpack"})  # the program says which of the parts it takes


class VariableSlices:
    """Tensors that ops have selected out of variables.

    In eager mode a routine records each execution.  In a graph the ops between variable and symbol show the
    selection, and whether its indices are constant.
    """

    def __init__(self) -> None:
        self._selections: dict[int, tuple[Any, bool]] = {}

    def follow(self, context: amanda.OpContext) -> None:
        """Record the elements of a variable that an op selects; call this in a forward analysis routine."""
        name = context.get_op_type()
        if name not in _SELECTIONS | _PASSED or not context.namespace.matches("tensorflow/*/eager"):
            return
        inputs = context.get_inputs()
        reads_variable = name in _SELECTIONS and any(
            context.get_variable(i) is not None for i in range(len(inputs))
        )
        selections = [selection for value in inputs if (selection := self._selection_of(value)) is not None]
        if reads_variable or selections:
            by_data = name in _SELECTIONS - _FIXED_SELECTIONS or any(by_data for _, by_data in selections)
            context.insert_after_op(self._record_selection, by_data=by_data)

    def reads(self, context: amanda.OpContext, index: int, by_data: bool) -> bool:
        """Return True if an input of an op was selected out of a variable.

        by_data: True to count only selections by indices that the data choose.
        """
        value = context.get_inputs()[index]
        selection = self._selection_of(value)
        return (selection[1] or not by_data) if selection is not None else _is_selected(value, by_data)

    def _selection_of(self, value: Any) -> tuple[Any, bool] | None:
        selection = self._selections.get(id(value))
        return selection if selection is not None and selection[0]() is value else None

    def _record_selection(self, *outputs: Any, by_data: bool) -> None:
        for tensor in leaves(outputs):
            self._selections[id(tensor)] = ref(tensor, partial(self._forget, id(tensor))), by_data

    def _forget(self, key: int, _: Any) -> None:
        self._selections.pop(key, None)


def _is_selected(symbol: Any, by_data: bool) -> bool:
    """Return True if a symbol of a graph was selected out of a variable; with `by_data`, by the data."""
    selects = False
    while True:
        try:
            op = symbol.op
        except AttributeError:  # an eager tensor has none
            return False
        if op.type in TENSORFLOW_READS or (op.inputs and _is_handle(op.inputs[0])):
            return selects or op.type in _SELECTIONS
        if op.type not in _SELECTIONS | _PASSED or not op.inputs:
            return False
        position = _VALUE_POSITIONS.get(op.type, 0)
        if op.type in _SELECTIONS and not selects:
            selects = not (
                by_data and _is_constant([value for i, value in enumerate(op.inputs) if i != position])
            )
        symbol = op.inputs[position]


def _is_handle(symbol: Any) -> bool:
    return str(getattr(symbol.dtype, "name", "")) == "resource"


def _is_constant(symbols: Any) -> bool:
    import tensorflow as tf

    return all(tf.get_static_value(symbol) is not None for symbol in symbols)


class MultipliedInput(NamedTuple):
    """The input of an op that the op's weight multiplies.

    position: among the op's inputs.  axis: of the channels, over which the op sums, from the end.
    layout: axes of a convolution's input, such as "NCHW"; None of a matrix product.  attributes: of the op.
    """

    position: int
    axis: int
    layout: str | None
    attributes: Mapping[str, Any]

    def rows(self, x: Any, extents: Sequence[int]) -> Any:
        """Return a value of the input as a matrix for each group of channels: (groups, positions, K).

        The matrix is without autograd, and in float32 or wider.  K counts the elements of the weight for each
        output, in the order of `canonical`.  Of a convolution, a row is what the window reads at one
        position, with zeros for padding.
        extents: of the canonical weight, (outputs, inputs, window).
        """
        plain = tensors_of(x).plain(x)
        if self.layout is None:
            plain = do("moveaxis", plain, self.axis, -1)
            return do("reshape", plain, (1, -1, shape(plain)[-1]))
        layout = self.layout if "N" in self.layout else f"N{self.layout}"
        plain = plain if len(shape(plain)) == len(layout) else plain[None]
        plain = do("transpose", plain, (layout.index("N"), *spatial_axes(layout), layout.index("C")))
        _, *sizes, channels = shape(plain)
        windows = list(zip(windows_of(self.attributes, layout, extents[2:]), sizes, strict=True))
        plain = do("pad", plain, ((0, 0), *(window.pads(size) for window, size in windows), (0, 0)))
        # Axis by axis, a window of 7x7 is 7 + 7 copies of slices.  As 49 slices each copy would touch every
        # cache line of the rows for one element of it, and an index of all positions is slower still.
        for axis, (window, size) in reversed(list(enumerate(windows, 1))):
            read = [plain[(slice(None),) * axis + (step,)] for step in window.slices(size)]
            plain = do("stack", read, axis - len(windows) - 1)
        rows = do("reshape", plain, (-1, channels // extents[1], prod(extents[1:])))
        return do("moveaxis", rows, 1, 0)


def multiplied_input(context: amanda.OpContext, weight: int) -> MultipliedInput | None:
    """Return the input that an op multiplies by its weight, of which the position is known.

    None for a transposed convolution, transposed factors, and axes of which the layout is not known.
    """
    roles, attributes = product_of(context), context.get_attrs()
    if roles is None or weight not in roles.factors or len(roles.factors) != 2:
        return None
    (position,) = (factor for factor in roles.factors if factor != weight)
    rank = len(context["shape"](context.get_inputs()[position]) or ())
    if context["type"] not in MATRIX_PRODUCTS:
        layout: str | None = context["layout"]
        if layout is None or context["type"] not in CONVOLUTIONS:
            return None
        return MultipliedInput(position, layout.index("C") - len(layout), layout, attributes)
    if "dimension_numbers" in attributes:  # JAX sums over any axis
        axis = attributes["dimension_numbers"][0][position][0] - rank
        return MultipliedInput(position, axis, None, attributes)
    if any(are_transposed(attributes)):
        return None
    is_matrix_behind = weight < position and rank > 1
    return MultipliedInput(position, -2 if is_matrix_behind else -1, None, attributes)
