"""Memory of tensors: storages, strided parts, elements that share a cell, equal bits, written parts."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from amanda.interceptor import Suspension
from torch.utils._python_dispatch import _disable_current_modes

from ._levels import innermost, is_wrapped, with_batches_first
from ._straight_through import in_forward_mode, straight_through

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that override nothing."""
_NO_DISPATCH: Any = torch.Tensor.__torch_dispatch__
_INDEX_METHODS_BY_LAYOUT = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def storage_id(tensor: torch.Tensor) -> int | None:
    """Return the address of the storage of a strided tensor, or of the one in its wrappers; else None."""
    try:
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
    except (NotImplementedError, RuntimeError):  # a wrapper of functorch
        return storage_id(innermost(tensor)) if is_wrapped(tensor) else None


def is_strided(value: Any) -> bool:
    """Return True for a tensor with one storage, sizes and strides."""
    if type(value) in PLAIN:
        return value.layout is torch.strided and not value.is_nested
    if not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is not _NO_DISPATCH:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return value.layout is torch.strided and not value.is_nested


def strided_parts(value: Any) -> Sequence[torch.Tensor]:
    """Return the strided tensors that hold a tensor's data: itself, or parts of a sparse or wrapped tensor.

    There are none for a value that is no tensor, or does not say what it consists of.
    """
    if is_strided(value):
        return (value,)
    if not isinstance(value, torch.Tensor):
        return ()
    try:  # reads of a wrapper's parts are neither ops nor calls of its overrides
        with Suspension(), torch._C.DisableTorchFunctionSubclass():
            if hasattr(type(value), "__tensor_flatten__"):
                wrapper: Any = value
                attribute_names, _ = wrapper.__tensor_flatten__()
                tensors = (getattr(value, name) for name in attribute_names)
                return [part for tensor in tensors for part in strided_parts(tensor)]
            # Another wrapper does not say what it holds.
            if type(value).__torch_dispatch__ is not _NO_DISPATCH:
                return ()
            if value.layout is torch.sparse_coo:
                return value._indices(), value._values()
            if value.layout in _INDEX_METHODS_BY_LAYOUT:
                indices = (getattr(value, name)() for name in _INDEX_METHODS_BY_LAYOUT[value.layout])
                return *indices, value.values()
            return (value.values(),) if value.is_nested else ()
    except (AttributeError, NotImplementedError, RuntimeError):  # a wrapper of functorch
        return ()


def has_overlap(tensor: torch.Tensor) -> bool:
    """Return True if elements share a memory cell by a stride of 0, as after `expand`, not otherwise."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def distinct_elements(tensor: torch.Tensor, expanded: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor with one element for each memory cell of an expanded tensor like it."""
    if not has_overlap(expanded):
        return tensor
    # Of each dimension that `expand` has repeated the first element alone.
    dimensions = zip(expanded.size(), expanded.stride(), strict=True)
    return tensor[tuple(slice(1 if size > 1 and stride == 0 else None) for size, stride in dimensions)]


def copy_laid_out_like(view: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, differentiably, into new memory with the layout of a view.

    An op then copies, makes a view, or refuses to write, as it would have done with the view.  A tensor of
    another shape, or one that is not strided, is cloned as it lies.
    """
    if not (is_strided(view) and is_strided(value)) or view.shape != value.shape:
        return value.clone()
    if not has_overlap(view):
        if view.stride() == value.stride():
            return value.clone()  # the usual case, and the cheapest op
        return value.new_empty_strided(value.size(), view.stride()).copy_(value)
    with torch.no_grad():
        data = value.detach()
        # The view is expanded, and so is the copy if elements that share a cell of the view are equal. Not in
        # forward mode: a gradient is laid out like its tensor, and may differ where the elements are equal.
        distinct_values = distinct_elements(data, view)
        if not in_forward_mode() and same_bits(distinct_values.expand(view.shape), data):
            memory = data.new_empty_strided(distinct_values.size(), view.stride()).copy_(distinct_values)
            copy = memory.as_strided(view.size(), view.stride())
        else:
            copy = data.new_empty_strided(view.size(), _strides_without_overlap(view)).copy_(data)
    return straight_through(value, copy)


def _strides_without_overlap(view: torch.Tensor) -> list[int]:
    """Return strides that give each element of an expanded view a memory cell of its own.

    A dimension that was not expanded keeps its stride, and cannot be joined with one that was: `reshape`
    would make a view of such two, where it copies the expanded view.
    """
    sizes, strides = list(view.size()), list(view.stride())
    # A dimension with one of these strides follows on another without a gap, and could be joined with it.
    joining_strides = {size * stride for size, stride in zip(sizes, strides, strict=True)} | set(strides)
    last_cell = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    next_stride = last_cell + 1
    for i in reversed(range(len(sizes))):
        if sizes[i] > 1 and strides[i] == 0:
            while next_stride in joining_strides:
                next_stride += 1
            strides[i], next_stride = next_stride, sizes[i] * next_stride
            # The next expanded dimension may be joined with this one, as the two can be in the view.
            joining_strides.discard(next_stride)
    return strides


def copy_in_storage_like(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value`, differentiably, at the offset and strides of `original` in a copy of that storage."""
    with torch.no_grad():
        storage = original.untyped_storage().clone()  # type: ignore[no-untyped-call]
        copy = torch.empty(0, dtype=original.dtype, device=original.device)
        copy.set_(storage, original.storage_offset(), original.size(), original.stride())
    return copy.copy_(value)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(first: Any, second: Any) -> bool:
    """Return True if two tensors have one shape, type, device and layout, and equal bits that can be read.

    Tensors of the device meta, which have no data, count as equal.
    """
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    try:
        first_form, second_form = (
            (tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in (first, second)
        )
        if first_form != second_form:
            return False
        first_parts, second_parts = strided_parts(first), strided_parts(second)
        if not first_parts or len(first_parts) != len(second_parts):
            return False
        # Modes of the program must not see the comparison.
        with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
            return all(map(_same_bits_of_strided, first_parts, second_parts))
    except (NotImplementedError, RuntimeError, TypeError):  # a tensor of a transform has no value to read
        return False


def _same_bits_of_strided(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.is_meta or second.is_meta:
        return first.shape == second.shape
    return torch.equal(_bits_as_integers(first), _bits_as_integers(second))


def _bits_as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as integers of the same bits."""
    # As integers: NaN must equal NaN, and 0.0 differ from -0.0.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.view(_BITS[tensor.element_size()])


class WrittenElements(NamedTuple):
    """Elements of a tensor that were written; mask: which of them."""

    tensor: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def at(cls, tensor: torch.Tensor, index: Any) -> "WrittenElements":
        """Return the elements of a tensor at an index, as `tensor[index] = y` writes them."""
        if is_wrapped(tensor):
            mask = torch.zeros_like(tensor, dtype=torch.bool)
        else:
            mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
        mask[index] = True
        return cls(tensor, mask)

    def part(self) -> "WrittenPart":
        """Return the elements as a part of their storage."""
        if is_wrapped(self.tensor):
            (_, data), (_, mask) = with_batches_first(self.tensor), with_batches_first(self.mask)
            return WrittenPart(data, mask)
        return WrittenPart(self.tensor, self.mask)


class WrittenPart:
    """Written elements of a storage: all or some elements of a tensor in it, or those of several tensors."""

    def __init__(self, tensor: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Note the written elements of a tensor: those that the mask selects; all without a mask."""
        self.tensor = tensor
        self._is_whole_storage = mask is None and _is_whole(tensor)
        # For each element of the storage, whether it was written; None as long as all of `tensor` was.
        self._flags: torch.Tensor | None = None
        if mask is not None:
            self._flags = self._unset_flags()
            # Of elements that are one in memory, one in the mask is enough: `copy_` would take the last.
            strided_as(self._flags, tensor).masked_fill_(mask, True)

    def add(self, tensor: torch.Tensor) -> "WrittenPart":
        """Add the elements of another tensor in the storage, and return this part.

        Elements of another size are not told apart: the whole storage then counts as written.
        """
        self._is_whole_storage = self._is_whole_storage or tensor.element_size() != self.tensor.element_size()
        if not self._is_whole_storage:
            strided_as(self._storage_flags(), tensor).fill_(True)
        return self

    def mask_in(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a mask of the elements of a tensor in the storage that were written; None if all were.

        An element of another size, as after `view(dtype)`, was written if any of its bytes was.
        """
        if self._is_whole_storage:
            return None
        size, written_size = tensor.element_size(), self.tensor.element_size()
        if self._flags is None and size == written_size and has_same_elements(self.tensor, tensor):
            return None
        flags = self._storage_flags()
        if size < written_size:
            flags = flags.repeat_interleave(written_size // size)
        elif size > written_size:
            flags_per_element = size // written_size
            element_count = len(flags) // flags_per_element  # the storage may end within an element
            flags = flags[: element_count * flags_per_element].view(-1, flags_per_element).any(1)
        return strided_as(flags, tensor)

    def _storage_flags(self) -> torch.Tensor:
        """Return the flags of the storage's elements; the first time, those of the tensor are set in them."""
        if self._flags is None:
            self._flags = self._unset_flags()
            strided_as(self._flags, self.tensor).fill_(True)
        return self._flags

    def _unset_flags(self) -> torch.Tensor:
        count = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        return torch.zeros(count, dtype=torch.bool, device=self.tensor.device)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is all of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def strided_as(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of values, one for each element of a storage, that a tensor has of the storage."""
    return flags.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def has_same_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return True if two tensors of one storage have the same elements, in the same order."""
    return (
        first.storage_offset() == second.storage_offset()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
    )
