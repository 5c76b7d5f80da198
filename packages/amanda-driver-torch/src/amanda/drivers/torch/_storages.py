"""Memory of tensors: strided parts, layouts in which elements are one, equal bits."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from amanda.interceptor import Suspension
from torch.utils._python_dispatch import _disable_current_modes

from ._straight_through import straight_through

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that override nothing."""
_NO_DISPATCH: Any = torch.Tensor.__torch_dispatch__
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def storage(tensor: torch.Tensor) -> int | None:
    """Return what tells the storage of a strided tensor from others; None where it has none."""
    try:
        return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
    except (NotImplementedError, RuntimeError):  # a wrapper of functorch
        return None


def is_strided(value: Any) -> bool:
    """Return True for a tensor with one storage, sizes and strides."""
    if type(value) in PLAIN:
        return value.layout is torch.strided and not value.is_nested
    if not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is not _NO_DISPATCH:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return value.layout is torch.strided and not value.is_nested


def strided_parts(value: Any) -> Sequence[torch.Tensor]:
    """Return the strided tensors in whose memory a tensor lies: those of a sparse, nested or wrapped one."""
    if is_strided(value):
        return (value,)
    if not isinstance(value, torch.Tensor):
        return ()
    try:
        with Suspension(), torch._C.DisableTorchFunctionSubclass():
            if hasattr(type(value), "__tensor_flatten__"):
                wrapper: Any = value
                inner = (getattr(value, name) for name in wrapper.__tensor_flatten__()[0])
                return [part for one in inner for part in strided_parts(one)]
            if type(value).__torch_dispatch__ is not _NO_DISPATCH:
                return ()
            if value.layout is torch.sparse_coo:
                return value._indices(), value._values()
            if value.layout in _COMPRESSED:
                return *(getattr(value, name)() for name in _COMPRESSED[value.layout]), value.values()
            return (value.values(),) if value.is_nested else ()
    except (AttributeError, NotImplementedError, RuntimeError):  # a wrapper of functorch
        return ()


def overlaps(tensor: torch.Tensor) -> bool:
    """Return whether several elements of a tensor are one in memory, as `expand` makes it."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return any(n > 1 and step == 0 for n, step in zip(tensor.size(), tensor.stride(), strict=True))


def distinct(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view with the elements of a tensor that are not one in the memory of `like`."""
    if not overlaps(like):
        return tensor
    pairs = zip(like.size(), like.stride(), strict=True)
    return tensor[tuple(slice(1 if n > 1 and step == 0 else None) for n, step in pairs)]


def laid_out_like(view: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, differentiably, into memory of its own that is laid out as that of a view.

    An op then copies, or makes a view, or refuses to write, where it would have done so with the view.
    """
    if not (is_strided(view) and is_strided(value)) or view.shape != value.shape:
        return value.clone()
    if not overlaps(view):
        if view.stride() == value.stride():
            return value.clone()
        return value.new_empty_strided(value.size(), view.stride()).copy_(value)
    with torch.no_grad():
        data = value.detach()
        once = distinct(data, view)
        if same_bits(once.expand(view.shape), data):
            own = data.new_empty_strided(once.size(), view.stride()).copy_(once)
            copy = own.as_strided(view.size(), view.stride())
        else:
            copy = data.new_empty_strided(view.size(), _strides_apart(view)).copy_(data)
    return straight_through(value, copy)


def _strides_apart(view: torch.Tensor) -> list[int]:
    """Return strides that tell apart what is one in the memory of a view, and join no other dimensions."""
    sizes, strides = list(view.size()), list(view.stride())
    taken = {n * step for n, step in zip(sizes, strides, strict=True)} | set(strides)
    step = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    for i in reversed(range(len(sizes))):
        if sizes[i] > 1 and strides[i] == 0:
            while step in taken:
                step += 1
            strides[i], step = step, sizes[i] * step
            taken -= {step}
    return strides


def in_memory_like(original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` where `original` lies, in a copy of that tensor's storage."""
    with torch.no_grad():
        own_storage = original.untyped_storage().clone()  # type: ignore[no-untyped-call]
        own = torch.empty(0, dtype=original.dtype, device=original.device)
        own.set_(own_storage, original.storage_offset(), original.size(), original.stride())
    return own.copy_(value)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Any, other: Any) -> bool:
    """Return True if two tensors are of one kind and hold the same bits, or are without data."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    try:
        if (one.shape, one.dtype, one.device, one.layout) != (
            other.shape,
            other.dtype,
            other.device,
            other.layout,
        ):
            return False
        parts, others = strided_parts(one), strided_parts(other)
        if not parts or len(parts) != len(others):
            return False
        with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
            return all(map(_same_strided, parts, others))
    except (NotImplementedError, RuntimeError, TypeError):  # a tensor of a transform has no value to read
        return False


def _same_strided(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_meta or other.is_meta:
        return one.shape == other.shape
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.view(_BITS[tensor.element_size()])
