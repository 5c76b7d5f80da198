"""Weight inputs of ops, also copies and selections of parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import amanda
from amanda.backend import ParameterSlot, TensorMap
from amanda.errors import AmandaError
from amanda.tools.kit import RequiredNames, Tensors, tensors_of
from amanda.tools.mapping import (
    MATRIX_PRODUCTS,
    StandardMapping,
)
from amanda.tools.weights._multiplied_input import MultipliedInput, multiplied_input
from amanda.tools.weights._parameters import ParameterStore, StridedLayout, parameter_store

if TYPE_CHECKING:
    from torch import Tensor

    from amanda.tools.weights._parameters_tensorflow import VariableSlices


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
    is_handed_in: True for a tensor that the program hands in for a parameter, another one at each call.
    """

    index: int
    layout: str | None
    holder: Any
    is_followed: bool
    is_lost: bool
    varies: bool
    is_part: bool
    is_handed_in: bool = False

    def multiplied_input(self, context: amanda.OpContext) -> MultipliedInput | None:
        """Return the input that the op multiplies by the weight; None where that is not followed."""
        return multiplied_input(context, self.index)


def weight_input(context: amanda.OpContext) -> WeightInput | None:
    """Return the weight input of a forward op; None for an op without a weight.

    Call it in an analysis routine of a tool that depends on StandardMapping and `WeightReads`.
    """
    reads: WeightReads = context[READS]
    return reads.find_weight_input(context)


class WeightReads(amanda.Tool):
    """Find the input that an op reads as weight; follow copies and selections of parameters up to that op.

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
        self.slices = FollowedSlices()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._follow)
        # Apart from `_follow`, which runs before an op: this one reads outputs, and so runs after it.
        self.add_inst_for_op(self.slices.follow_symbols, require_outputs=True)

    @staticmethod
    def computes_weight(context: amanda.OpContext) -> bool:
        """Return True if an op belongs to a parametrization of PyTorch, which computes a weight."""
        return ".parametrizations." in f".{context.get_scope()}."

    @cached_property
    def _variables(self) -> VariableSlices:
        """The tensors that ops of TensorFlow have selected out of variables."""
        from amanda.tools.weights._parameters_tensorflow import VariableSlices

        return VariableSlices()

    def stands_for(self) -> Hashable:
        """Return a key that all instances share, so that a scope has one of them."""
        return WeightReads

    def scope_left(self) -> None:
        """Forget freed tensors."""
        self.slices.forget_freed_copies()

    def __reduce__(self) -> Any:
        return WeightReads, ()

    def _follow(self, context: amanda.OpContext) -> None:
        """Follow the op's copies of parameters, and record the slice that each execution reads as weight.

        Sets `context[READS]` for `weight_input`; does nothing where an outer scope has done so.
        """
        # Two followers would record each copy twice, and the inner one sees values that outer tools have
        # changed.
        if READS in context:  # a scope around this one follows already
            return
        # Later analysis routines of the same op reach this instance by the context, without a reference from
        # tool to tool.
        context[READS] = self
        if context["phase"] != "forward":
            return
        if context.namespace.matches("pytorch"):
            self.slices.follow(context)
            index = self._weight_position(context)
            if index is not None and self._may_read_another_part(context, index):
                context.insert_before_op(self._record_slice, inputs=[index])
        elif context.namespace.matches("tensorflow"):
            self._variables.follow(context)

    @amanda.differentiable  # to be given a view of a parameter as a view
    def _record_slice(self, value: Any, run: dict[str, Any]) -> None:
        run[SLICE] = self.slices.slice_of(value)

    def find_weight_input(self, context: amanda.OpContext) -> WeightInput | None:
        """Return the weight input of an op; None for an op without a weight."""
        index = self._weight_position(context)
        if index is None:
            return None
        layout: str | None = context["weight_layout"]
        if context["weight_index"] is None and context["type"] in MATRIX_PRODUCTS:
            first, *_ = MATRIX_PRODUCTS[context["type"]].factors
            # As the first factor, weight @ x, a weight has its outputs first; as the second its inputs.
            layout = "OI" if index == first else "IO"
        holder = context.get_variable(index)
        # A view of a parameter has the parameter as its variable; a copy or a selection has none, and needs
        # the record.
        is_moved = holder is None and self._is_copied_or_selected(context, index)
        is_followed = self._may_read_another_part(context, index)
        # The file of a model has one execution as it were, in which nothing varies.
        varies = is_moved and not context.is_static() and self._is_selected_by_data(context, index)
        # Only routines in eager PyTorch are told at each execution what was copied or selected.
        is_lost = is_moved and not context.namespace.matches("pytorch/*/eager")
        return WeightInput(
            index=index, layout=layout, holder=holder, is_followed=is_followed, is_lost=is_lost,
            varies=varies,
            is_part=not varies and (is_followed or _is_part_in_graph(context, index)),
            is_handed_in=isinstance(holder, ParameterSlot),
        )  # fmt: skip

    def slice_of_input(self, context: amanda.OpContext, index: int) -> ParameterSlice | None:
        """Return the slice of a parameter that an input is; None for a computed value.

        Args:
            context: Context of the op.
            index: Position of the input.
        """
        value = context.get_inputs()[index]
        # Symbols of a graph have no memory to compare: the layout that the graph states is taken.
        if not _is_part_in_graph(context, index):
            return self.slices.slice_of(value)
        return ParameterSlice(context.get_variable(index), _raise_unknown_part, StridedLayout.of(value))

    def _weight_position(self, context: amanda.OpContext) -> int | None:
        """Return `weight_index`, else the position of the only copied or selected factor; None without."""
        index: int | None = context["weight_index"]
        if index is not None:
            return index
        product = MATRIX_PRODUCTS.get(context["type"])
        # Two copied factors, such as queries and keys out of one parameter, are both activations: no position
        # is a weight then.
        positions = [i for i in product.factors if self._is_copied_or_selected(context, i)] if product else []
        return positions[0] if len(positions) == 1 else None

    def _may_read_another_part(self, context: amanda.OpContext, index: int) -> bool:
        """Return True if each execution of an eager op may read another part of a parameter, or of a copy."""
        if not context.namespace.matches("pytorch/*/eager"):
            return False
        value, holder = context.get_inputs()[index], context.get_variable(index)
        if holder is None:
            return self.slices.copied_slice(value) is not None
        import torch

        # A parameter itself is the same at each execution of its op, as is the whole tensor in a slot; a view
        # may be another one, as in a loop over `weight[i]`.
        return not isinstance(holder, ParameterSlot) and not isinstance(value, torch.nn.Parameter)

    def _is_copied_or_selected(self, context: amanda.OpContext, index: int) -> bool:
        """Return True for an input that was copied or selected out of a parameter, False for a view.

        At a known weight position of TensorFlow only a selection by data counts.
        """
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            return self.slices.copied_slice(value) is not None or self.slices.is_selected(value)
        # A factor without a known position counts as a weight if anything selected it; at the known position
        # only a choice by data makes it a moved one.
        must_be_by_data = context["weight_index"] is not None
        is_tensorflow = context.namespace.matches("tensorflow")
        return is_tensorflow and self._variables.is_selection(context, index, must_be_by_data)

    def _is_selected_by_data(self, context: amanda.OpContext, index: int) -> bool:
        """Return True if the data select the elements of a parameter that an op reads."""
        value = context.get_inputs()[index]
        if context.namespace.matches("pytorch"):
            parameter_slice = self.slices.copied_slice(value)
            return self.slices.is_selected(value) if parameter_slice is None else parameter_slice.form is None
        is_tensorflow = context.namespace.matches("tensorflow")
        return is_tensorflow and self._variables.is_selection(context, index, must_be_by_data=True)


def _is_part_in_graph(context: amanda.OpContext, index: int) -> bool:
    """Return True where an op of a graph of PyTorch reads the same part of a parameter each time."""
    if not context.namespace.matches("pytorch/*/graph") or context.is_static():
        return False
    variable = context.get_variable(index)
    return variable is not None and context.get_inputs()[index].numel() < variable.numel()


def _raise_unknown_part(whole: Any) -> Any:  # `ParameterSlice.of` for a symbol
    raise AmandaError("the part of a parameter that a graph reads is known only while it runs")


_REQUIRED = RequiredNames("amanda.tools.weights", "torch", "torch:UntypedStorage._cdata")

COPIES = frozenset({"contiguous", "clone", "to"})
"""Ops whose result is their input element by element, elsewhere in memory or in another type."""
SELECTIONS = frozenset({"getitem", "index_select", "embedding"})
"""Ops that select elements by indices, which the data may choose."""

READS, SLICE = "amanda.tools.weights: reads", "amanda.tools.weights: slice of the weight"
"""Keys of contexts and of executions."""

_FIRST_SWEEP = 64  # number of copies at which freed ones are first looked for
_instance_numbers = count()


@dataclass(frozen=True)
class ParameterSlice:
    """The parameter, and the part of it, that a tensor is.

    holder: the parameter.  of: gives the same elements of any tensor in the parameter's shape.
    form: which part of the parameter it is, element by element; None of elements that were selected.
    """

    holder: Tensor
    of: Callable[[Tensor], Tensor]
    form: StridedLayout | None

    @classmethod
    def of_input(cls, context: amanda.OpContext, index: int) -> ParameterSlice | None:
        """Return the slice that an input of an op is, during analysis; None for a computed value.

        The tool that calls this depends on `WeightReads`.

        Args:
            context: Context of the op.
            index: Position of the input.
        """
        return cast("ParameterSlice | None", context[READS].slice_of_input(context, index))

    @classmethod
    def of_execution(cls, run: Mapping[str, Any]) -> ParameterSlice | None:
        """Return the slice that the weight was before any tool changed it; None for a computed weight.

        run: the dict of the execution that a routine receives.
        """
        return run.get(SLICE)


class _CopiedSlice(NamedTuple):
    """A tensor that was copied or selected out of a parameter, as long as its storage lives.

    storage, holder: weak references of its storage and of the parameter.  layout: of the tensor.
    select, form: see `of` and `form` of ParameterSlice.
    """

    storage: Any
    layout: StridedLayout
    holder: Callable[[], Tensor | None]
    select: Callable[[Tensor], Tensor]
    form: StridedLayout | None


@cache
def _torch_tensors_and_store() -> tuple[Tensors, ParameterStore]:
    """Return the operations on PyTorch's tensors and parameters: a hot path asks for them once."""
    import torch

    return tensors_of(torch.empty(0)), parameter_store("torch")


class FollowedSlices:
    """Copies and selections of parameters' elements, as long as these live.

    In eager mode routines follow each execution.  Of a graph's symbols it is only recorded that they are
    selections: ops of a graph are analysed in the order in which they compute.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _CopiedSlice] = {}  # by address of the storage
        self._copy_count_at_next_sweep = _FIRST_SWEEP
        self._symbols: TensorMap[bool] = TensorMap()  # True for each that was selected out of a parameter
        self._inputs_key = f"inputs {next(_instance_numbers)}"  # several tools may follow one op

    def copied_slice(self, value: Tensor) -> ParameterSlice | None:
        """Return the slice that a tensor is a copy or selection of; None for a view or a computed tensor."""
        tensors, _ = _torch_tensors_and_store()
        # Keyed by storage and not by tensor: each view of a copy is another tensor, and Python may drop and
        # make tensor objects anew. `_cdata` is private; `data_ptr` is 0 for all empty storages.
        copied = self._copies.get(value.untyped_storage()._cdata) if tensors.is_strided(value) else None
        # A new tensor may have the address of a freed storage: the weak reference tells them apart.
        holder = None if copied is None or copied.storage.expired() else copied.holder()
        if copied is None or holder is None:
            return None
        view = StridedLayout.of(value)
        # The frequent case, in which the copy is read as it was made, needs no composition of layouts.
        if view == copied.layout:
            return ParameterSlice(holder, copied.select, copied.form)
        form = None if copied.form is None else _compose_layouts(copied.form, copied.layout, view)
        return ParameterSlice(holder, partial(_select_and_view, copied.select, copied.layout, view), form)

    def follow(self, context: amanda.OpContext) -> None:
        """Insert routines to record what an eager op copies or selects of parameters, in the forward pass."""
        if context["type"] not in COPIES | SELECTIONS or not context.namespace.matches("pytorch/*/eager"):
            return
        if self.slice_of(next(iter(context.get_inputs()), None)) is None:
            return
        # A selection is repeated later by the op itself, on other tensors of the parameter's shape: state and
        # masks.
        compute = None if context["type"] in COPIES else context.get_computation()
        # Inputs are recorded before the op: afterwards an op in place may have overwritten them.
        context.insert_before_op(_record_inputs, name=self._inputs_key)
        context.insert_after_op(self._record_copy, compute=compute)

    def follow_symbols(self, context: amanda.OpContext) -> None:
        """Record the symbols that an op of a graph of PyTorch selects out of a parameter."""
        if context["type"] not in COPIES | SELECTIONS or not context.namespace.matches("pytorch/*/graph"):
            return
        selects = context["type"] in SELECTIONS and context.get_variable(0) is not None
        if selects or self.is_selected(context.get_inputs()[0]):
            for output in context.get_outputs() or ():
                # A view of the parameter needs no record: the graph names its parameter.
                is_view = getattr(output, "_base", output) is not None
                if not is_view:
                    self._symbols[output] = True

    def is_selected(self, symbol: Any) -> bool:
        """Return True if a symbol of a graph was selected out of a parameter, or is a view of such."""
        base = getattr(symbol, "_base", None)
        return self._symbols.get(symbol if base is None else base) is not None

    @amanda.differentiable  # to be given what is a view of a parameter as that
    def _record_copy(self, output: Any, compute: Callable[[list[Any]], Tensor] | None, run: Any) -> None:
        """Record the slice of a parameter that an output is a copy or a selection of, if it is no view.

        compute: repeats the op on other inputs, for a selection; None for a copy.
        """
        # Popped: the dict of an execution lives until its backward pass, and would keep the inputs.
        copied_input, *indices = run.pop(self._inputs_key)
        source = self.slice_of(copied_input)
        tensors, store = _torch_tensors_and_store()
        # `contiguous` and `to` return their input where nothing is to do, which is a view of the parameter
        # and no copy.
        if source is None or not tensors.is_strided(output) or store.owner(output) is not None:
            return
        # Freed entries go once the table has doubled, so that a copy costs constant time.
        if len(self._copies) >= self._copy_count_at_next_sweep:
            self.forget_freed_copies()
        select, form = source.of, source.form
        if compute is not None:
            select, form = partial(_select_by_indices, compute, select, indices), None
        self._copies[output.untyped_storage()._cdata] = _copied_slice(output, source.holder, select, form)

    def forget_freed_copies(self) -> None:
        """Forget freed copies, and with them the indices that selected them."""
        for key, copied in list(self._copies.items()):  # other threads may write meanwhile
            if copied.storage.expired() and self._copies.get(key) is copied:
                self._copies.pop(key, None)
        self._copy_count_at_next_sweep = max(_FIRST_SWEEP, 2 * len(self._copies))

    def slice_of(self, value: Any) -> ParameterSlice | None:
        """Return the slice of a parameter that an input views, copies or selects; None for another value."""
        tensors, store = _torch_tensors_and_store()
        if not tensors.is_strided(value):
            return None
        holder = store.owner(value)
        if holder is None:
            return self.copied_slice(value)
        form = StridedLayout.of(value)
        view_like_value = partial(_select_and_view, _identity, StridedLayout.of(holder), form)
        return ParameterSlice(holder, view_like_value, form)


def _copied_slice(
    copy: Tensor, holder: Tensor, select: Callable[[Tensor], Tensor], form: StridedLayout | None
) -> _CopiedSlice:
    """Return the record of a copy, which keeps neither the copy nor the parameter alive."""
    # PyTorch's only weak reference to a storage; it is used by its multiprocessing, and imported late for
    # its cost.
    from torch.multiprocessing.reductions import StorageWeakRef

    _REQUIRED.check()
    weak_storage = StorageWeakRef(copy.untyped_storage())  # type: ignore[no-untyped-call]
    # Weak: a record must not keep a model alive that the program has dropped.
    return _CopiedSlice(weak_storage, StridedLayout.of(copy), weakref.ref(holder), select, form)


@amanda.differentiable
def _record_inputs(*inputs: Any, name: str, run: dict[str, Any]) -> None:
    run[name] = inputs


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _select_by_indices(
    compute: Callable[[list[Any]], Tensor], select: Callable[[Tensor], Tensor], indices: Any, whole: Tensor
) -> Tensor:
    """Return what an op selects by indices out of the elements that `select` takes of a whole tensor."""
    return compute([select(whole), *indices])


def _select_and_view(
    select: Callable[[Tensor], Tensor], base: StridedLayout, view: StridedLayout, whole: Tensor
) -> Tensor:
    """Return the elements that `select` takes of a tensor, viewed as `view` views a tensor in layout `base`.

    whole: in the parameter's shape.  base, view: layouts in one memory.
    """
    import torch

    elements = select(whole)
    # as_strided needs the memory order of `base`, and a computed copy may have another.
    if elements.stride() != base.strides or not elements.is_contiguous():
        memory = torch.empty_strided(base.extents, base.strides, dtype=elements.dtype, device=elements.device)
        elements = memory.copy_(elements)
    offset = view.offset - base.offset + elements.storage_offset()
    return elements.as_strided(view.extents, view.strides, offset)


def _compose_layouts(part: StridedLayout, copy: StridedLayout, view: StridedLayout) -> StridedLayout | None:
    """Return the layout in the parameter of the elements that a view of a copied part has.

    part: of the copied elements in the parameter.  copy: of the copy in its memory.  view: in that memory.
    None if no strides describe the elements, and for no elements.
    """
    import torch

    if not prod((*part.extents, *view.extents)):
        return None
    # Each element is the number of its place in the parameter, which shows where the view lies; strides of
    # views cannot be multiplied in general.
    part_positions = torch.arange(part.offset, part.end).as_strided(part.extents, part.strides)
    positions = _select_and_view(_identity, copy, view, part_positions)
    origin = (0,) * positions.dim()
    first = int(positions[origin])
    # The first two elements along each axis determine its stride, if any strides describe the view.
    strides = []
    for axis, size in enumerate(positions.shape):
        second = (*origin[:axis], 1, *origin[axis + 1 :])
        strides.append(int(positions[second]) - first if size > 1 else 1)
    # as_strided takes no negative strides, as after a flip.
    if min(strides, default=0) < 0:
        return None
    composed = StridedLayout(tuple(positions.shape), tuple(strides), first)
    strided = torch.arange(composed.offset, composed.end).as_strided(composed.extents, composed.strides)
    return composed if torch.equal(strided, positions) else None
