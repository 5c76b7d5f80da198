"""Slices of parameters: tensors that ops view, copy or select out of them, and the state of each slice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import amanda
from amanda import interceptor
from amanda.backend import TensorMap
from amanda.tools.kit import RequiredNames, Tensors, tensors_of
from amanda.tools.weights._parameters import ParameterStore, StridedLayout, parameter_store

if TYPE_CHECKING:
    from torch import Tensor


_REQUIRED = RequiredNames("amanda.tools.weights", "torch", "torch:UntypedStorage._cdata")

COPIES = frozenset({"contiguous", "clone", "to"})
"""Ops whose result is their input element by element, elsewhere in memory or in another type."""
SELECTIONS = frozenset({"getitem", "index_select", "embedding"})
"""Ops that select elements by indices, which the data may choose."""

READS, SLICE = "amanda.tools.weights: reads", "amanda.tools.weights: slice of the weight"
"""Keys of contexts and of executions."""

_FIRST_SWEEP = 64
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
        """
        return cast("ParameterSlice | None", context[READS].source(context, index))

    @classmethod
    def of_execution(cls, run: Mapping[str, Any]) -> ParameterSlice | None:
        """Return the slice that the weight was before any tool changed it; None for a computed weight.

        run: the dict of the execution that a routine receives.
        """
        return run.get(SLICE)


class _CopiedSlice(NamedTuple):
    """A tensor that was copied or selected out of a parameter, as long as its storage lives."""

    storage: Any
    layout: StridedLayout
    holder: Callable[[], Tensor | None]
    of: Callable[[Tensor], Tensor]
    form: StridedLayout | None


@cache
def _torch_tensors_and_store() -> tuple[Tensors, ParameterStore]:
    """Return the operations on PyTorch's tensors and parameters: a hot path asks for them once."""
    import torch

    return tensors_of(torch.empty(0)), parameter_store("torch")


class FollowedSlices:
    """Copies and selections of parameters' elements, as long as these live.

    In eager mode routines follow each execution.  Of a graph's symbols no more is known than that they are
    selections, which ops are analysed in the order in which they compute.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _CopiedSlice] = {}
        self._sweep_at = _FIRST_SWEEP
        self._symbols: TensorMap[bool] = TensorMap()
        self._inputs_key = f"inputs {next(_instance_numbers)}"  # several tools may follow one op

    def of(self, value: Tensor) -> ParameterSlice | None:
        """Return the slice that a tensor is which is no view of a parameter; None for a computed tensor."""
        tensors, _ = _torch_tensors_and_store()
        copied = self._copies.get(value.untyped_storage()._cdata) if tensors.is_strided(value) else None
        # A new tensor may have the address of a freed storage: the weak reference tells them apart.
        holder = None if copied is None or copied.storage.expired() else copied.holder()
        if copied is None or holder is None:
            return None
        form = StridedLayout.of(value)
        if form == copied.layout:
            return ParameterSlice(holder, copied.of, copied.form)
        part = None if copied.form is None else _composed(copied.form, copied.layout, form)
        return ParameterSlice(holder, partial(_viewed_as, copied.of, copied.layout, form), part)

    def follow(self, context: amanda.OpContext) -> None:
        """Record the copies and selections of parameters that an op makes; call it in a forward analysis."""
        if context["type"] not in COPIES | SELECTIONS or not context.namespace.matches("pytorch/*/eager"):
            return
        if self.source(next(iter(context.get_inputs()), None)) is None:
            return
        compute = None if context["type"] in COPIES else context.get_computation()
        context.insert_before_op(_record_inputs, name=self._inputs_key)
        context.insert_after_op(self._record_copy, compute=compute)

    def follow_symbols(self, context: amanda.OpContext) -> None:
        """Note the outputs of an op of a graph as `follow` does, where outputs are symbols."""
        if context["type"] not in COPIES | SELECTIONS or not context.namespace.matches("pytorch/*/graph"):
            return
        selects = context["type"] in SELECTIONS and context.get_variable(0) is not None
        if selects or self.is_selected(context.get_inputs()[0]):
            for output in context.get_outputs() or ():
                if (
                    getattr(output, "_base", output) is None
                ):  # else it is a view of the parameter, which is known
                    self._symbols[output] = True

    def is_selected(self, symbol: Any) -> bool:
        """Return True if a symbol of a graph was selected out of a parameter, or is a view of such."""
        base = getattr(symbol, "_base", None)
        return self._symbols.get(symbol if base is None else base) is not None

    @amanda.differentiable  # to be given what is a view of a parameter as that
    def _record_copy(self, output: Any, compute: Callable[[list[Any]], Tensor] | None, run: Any) -> None:
        """Record the slice of a parameter that an output is a copy of."""
        inputs = run.pop(self._inputs_key)
        source = self.source(inputs[0])
        tensors, store = _torch_tensors_and_store()
        if source is None or not tensors.is_strided(output) or store.owner(output) is not None:
            return
        from torch.multiprocessing.reductions import StorageWeakRef

        # Freed entries go once the table has doubled, so that a copy costs constant time.
        if len(self._copies) >= self._sweep_at:
            self.sweep()
        _REQUIRED.check()
        storage, of, form = output.untyped_storage(), source.of, source.form
        if compute is not None:
            of, form = partial(_selected, compute, of, inputs[1:]), None
        lives = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._copies[storage._cdata] = _CopiedSlice(
            lives, StridedLayout.of(output), weakref.ref(source.holder), of, form
        )

    def sweep(self) -> None:
        """Forget what is freed, and with it the indices that selected it."""
        for key, copied in list(self._copies.items()):  # other threads may write meanwhile
            if copied.storage.expired() and self._copies.get(key) is copied:
                self._copies.pop(key, None)
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._copies))

    def source(self, value: Any) -> ParameterSlice | None:
        """Return the slice of a parameter that an input views, copies or selects; else None."""
        tensors, store = _torch_tensors_and_store()
        if not tensors.is_strided(value):
            return None
        holder = store.owner(value)
        if holder is None:
            return self.of(value)
        form = StridedLayout.of(value)
        return ParameterSlice(holder, partial(_viewed_as, _identity, StridedLayout.of(holder), form), form)


@amanda.differentiable
def _record_inputs(*inputs: Any, name: str, run: dict[str, Any]) -> None:
    run[name] = inputs


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _selected(
    compute: Callable[[list[Any]], Tensor], of: Callable[[Tensor], Tensor], indices: Any, whole: Tensor
) -> Tensor:
    return compute([of(whole), *indices])


def _viewed_as(
    of: Callable[[Tensor], Tensor], layout: StridedLayout, form: StridedLayout, whole: Tensor
) -> Tensor:
    """Return the values of `of` with the layout in memory of the tensor that they replace, as a view."""
    import torch

    laid = of(whole)
    extents, strides, offset = layout
    # as_strided needs the memory order of the replaced tensor, and a computed copy may have another.
    if laid.stride() != strides or not laid.is_contiguous():
        values, laid = laid, torch.empty_strided(extents, strides, dtype=laid.dtype, device=laid.device)
        laid.copy_(values)
    return laid.as_strided(form.extents, form.strides, form.offset - offset + laid.storage_offset())


def _composed(part: StridedLayout, layout: StridedLayout, form: StridedLayout) -> StridedLayout | None:
    """Return the part of a parameter that a view of a copy of a part is; None if no strides describe it."""
    import torch

    if not prod((*part.extents, *form.extents)):
        return None
    # Numbered elements show where the view lies; strides of views cannot be multiplied in general.
    places = torch.arange(part.offset, part.end).as_strided(part.extents, part.strides)
    positions = _viewed_as(_identity, layout, form, places)
    first = positions[(0,) * positions.dim()]
    steps = [int(positions.select(axis, 1)[(0,) * (positions.dim() - 1)] - first) if size > 1 else 1
             for axis, size in enumerate(positions.shape)]  # fmt: skip
    composed = StridedLayout(tuple(positions.shape), tuple(steps), int(first))
    if min(steps, default=0) < 0:
        return None
    whole = torch.arange(composed.offset, composed.end).as_strided(composed.extents, composed.strides)
    return composed if torch.equal(whole, positions) else None


def may_vary(context: amanda.OpContext, index: int) -> bool:
    """Return True if an eager op of PyTorch may read another weight at its next execution."""
    if not context.namespace.matches("pytorch/*/eager") or context.get_variable(index) is None:
        return False
    import torch

    return not isinstance(context.get_inputs()[index], torch.nn.Parameter)


def is_adapter(context: amanda.OpContext) -> bool:
    """Return True if the op is one of a LoRA adapter of peft, which is trained beside the model's weights."""
    return any(part.startswith("lora_") for path in context.get_scopes() for part in path.split("."))


def in_memory_order(form: StridedLayout) -> tuple[int, ...]:
    """Return the axes of a part in memory order, which is the same for all of its forms."""
    extents, strides, _ = form
    return tuple(sorted(range(len(extents)), key=lambda axis: (extents[axis] == 1, -strides[axis])))


class SharedState:
    """The place that state of a part is kept under, whichever op of it happens to read the part first.

    A parameter whose path in the model is known needs no more than the part.
    """

    def __init__(self) -> None:
        self._readers: dict[Hashable, amanda.OpContext] = {}
        self._holders: dict[amanda.OpContext, list[Hashable]] = {}
        self._lines: dict[Hashable, list[Hashable]] = {}
        self._states: dict[Hashable, Any] = {}

    def state_of(
        self,
        context: amanda.OpContext,
        part: ParameterSlice | None,
        make: Callable[[amanda.OpContext, str], Any],
        line: Hashable = None,
    ) -> Any:
        """Return the state of a part of a parameter, from `make(reader, suffix)` at its first reader.

        reader, suffix: see `key_for`.  line: of the op, where each line that reads the part has state of its
        own; the suffix of all lines but the first has the line's number.
        Returns None for what is no part: what was computed, or selected.
        """
        if part is None or part.form is None:
            return None
        identity, form = interceptor.ordinal(part.holder), part.form
        reader, suffix = self.key_for(context, identity, form, StridedLayout.of(part.holder))
        if line is not None:
            lines = self._lines.setdefault((reader, identity), [])
            if line not in lines:
                lines.append(line)
            suffix += f"~{number}" if (number := lines.index(line)) else ""
        key = reader, identity, form, line
        if key not in self._states:
            self._states[key] = make(reader, suffix)
        return self._states[key]

    def key_for(
        self,
        context: amanda.OpContext,
        identity: Hashable,
        part: StridedLayout | None,
        whole: StridedLayout,
        is_named: bool = False,
    ) -> tuple[amanda.OpContext, str]:
        """Return the context of the first reader of the parameter's parts, and a suffix for names of state.

        identity: of the parameter; is_named: whether names of state have its path.
        part: the form that is read, None for all of it.  whole: its own form.
        """
        is_part = part is not None and prod(part.extents) < prod(whole.extents)
        reader = self._readers.setdefault(identity, context) if is_part else context
        holders = self._holders.setdefault(reader, [])
        if identity not in holders:
            holders.append(identity)
        number = 0 if is_named else holders.index(identity)
        offset = f"@{part.offset}" if is_part and part is not None else ""
        return reader, offset + (f"#{number}" if number else "")
