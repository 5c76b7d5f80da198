"""Operations of the kit on tensors of PyTorch, which stay on their device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import amanda
from amanda.tools.kit._elements_torch import (
    FREED,
    TorchSamples,
    is_freed,
    is_wrapped,
    resolved,
    rows_of_bytes,
    stored,
    stored_elements,
    why_unread,
)
from amanda.tools.kit._tensors import RequiredNames, Samples, Save, Tensors
from amanda.tools.mapping import distributed, is_partial, local, whole

_REQUIRED = RequiredNames(
    "amanda.tools.kit", "torch", "torch:UntypedStorage._cdata",
    "torch:_C._functorch.is_functorch_wrapped_tensor", "torch:_C._functorch.is_legacy_batchedtensor",
)  # fmt: skip
# Real element types that NumPy has too.
_NAMES = "float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool".split()
_NUMPY = {getattr(torch, name): np.dtype(name) for name in _NAMES}


class _BorrowedMemory:
    """A tensor's memory as NumPy asks for it; Tensor.numpy() would forbid the storage to change its size."""

    def __init__(self, x: Tensor, dtype: np.dtype[Any]) -> None:
        self._owner = x
        self.__array_interface__ = {
            "version": 3, "data": (x.data_ptr(), True), "shape": tuple(x.shape), "typestr": dtype.str,
            # None for those of an array in one piece.
            "strides": None if x.is_contiguous() else tuple([step * dtype.itemsize for step in x.stride()]),
        }  # fmt: skip


class TorchTensorLibrary(Tensors):
    """Tensors of PyTorch: what is computed stays on their device."""

    def __init__(self) -> None:
        _REQUIRED.check()

    def library(self, *values: Any) -> Any:
        return torch

    def is_parameter(self, x: Any) -> bool:
        return isinstance(x, torch.nn.Parameter)

    def is_strided(self, x: Any) -> bool:
        """Return True for a strided tensor of PyTorch's own classes."""
        is_own = type(x) in (torch.Tensor, torch.nn.Parameter)
        return is_own and x.layout is torch.strided and not x.is_nested and not is_wrapped(x)

    def plain(self, x: Tensor) -> Tensor:
        x = whole(x.detach())
        x = x if type(x) is torch.Tensor else x.as_subclass(torch.Tensor)
        return x if x.element_size() >= 4 else x.float()

    def to_numpy(self, x: Any) -> NDArray[Any]:
        """Return an array of NumPy: a copy, since no storage that NumPy has seen can change its size."""
        x = resolved(x)
        x = x.float() if x.is_floating_point() and x.element_size() < 4 else x
        return np.asarray(x.cpu().clone().numpy())

    def exact(self, x: Tensor) -> NDArray[Any]:
        """Return a copy of the elements in their own type, which may be one of ml_dtypes."""
        x = resolved(x).cpu().contiguous()
        dtype = Tensors.numpy_type(str(x.dtype).removeprefix("torch."))
        # PyTorch hands no bfloat16 or float8 to NumPy, so the bits travel as integers.
        if dtype.isbuiltin != 1:
            x = x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize])
        return np.asarray(x.clone().numpy().view(dtype))

    def duplicate(self, x: Tensor) -> Tensor:
        return x.clone()

    def copy(self, array: Any) -> Tensor:
        """Return a contiguous copy to be written into later."""
        # A tensor made in inference mode could not be written into later outside of it.
        with torch.inference_mode(False):
            return torch.as_tensor(array).clone(memory_format=torch.contiguous_format)

    def kind(self, x: Tensor) -> tuple[Hashable, Hashable]:
        return x.dtype, x.device

    def extents(self, x: Tensor) -> tuple[int, ...]:
        x = local(x)
        return (int(x.numel()),) if x.is_nested else tuple(map(int, x.shape))

    def unread(self, x: Tensor) -> str | None:
        """Return why a tensor cannot be read: no data, a transform, a class of its own; else None."""
        tensor_class = type(x)
        if tensor_class is torch.Tensor or tensor_class is torch.nn.Parameter:  # a hot path
            if x.is_meta:
                return "it has a shape and no elements, on the device meta"
            if is_wrapped(x):
                return "it belongs to a transform, such as vmap"
            return FREED if is_freed(x) else None
        return why_unread(x)

    def samples(self, x: Tensor) -> Samples | None:
        """Return the samples of a value of torch.func; None where what it wraps cannot be read."""
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):  # a hot path
            return None
        samples = TorchSamples(x)
        return samples if self.unread(samples.data) is None else None

    def dense(self, x: Tensor) -> Tensor | None:
        """Return a tensor that stores each of its elements; None of nested ones and on the meta device."""
        if self.unread(x) is not None or x.is_nested:
            return None
        x = stored(x).detach()
        return (x if x.layout is torch.strided else x.to_dense()).as_subclass(torch.Tensor)

    def at(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        # Indices per axis, since flattening a tensor that is not contiguous copies all of it.
        indices = torch.unravel_index(torch.tensor(positions, device=x.device), x.shape) if x.dim() else ()
        return x[indices].reshape(-1)

    def stored_values(self, x: Tensor, widen: bool = False) -> Tensor | None:
        if self.unread(x) is not None:
            return None
        x = stored(x)
        if x.layout is not torch.strided or x.is_nested:
            x = stored_elements(x)
        if x.is_complex():
            x = (x.to(torch.complex128) if widen else x).abs()
        # PyTorch has no reductions of float8.
        if widen and x.element_size() == 1:
            x = x.float()
        return x if type(x) is torch.Tensor else x.as_subclass(torch.Tensor)

    def unstored(self, x: Tensor, numbers: Tensor) -> int:
        x = local(x)
        return 0 if x.layout is torch.strided or x.is_nested else x.numel() - numbers.numel()

    def borrowed(self, x: Tensor) -> NDArray[Any] | None:
        """Return an array over the memory of a plain tensor on the host."""
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.dtype not in _NUMPY or not x.is_cpu:
            return None
        # A lazy negation is not in the memory yet, and NumPy would miss it.
        if x.layout is not torch.strided or x.is_nested or x.is_neg() or not x.numel() or not x.data_ptr():
            return None
        return None if is_freed(x) else np.asarray(_BorrowedMemory(x, _NUMPY[x.dtype]))

    def blocks(self, numbers: Tensor) -> Iterator[Any]:
        """Yield flat pieces in the device's widest floating type; of what is on the host, arrays of NumPy."""
        device = numbers.device.type
        wide = torch.float32 if device == "mps" else torch.float64
        size = self.cached_block if device == "cpu" else self.device_block
        for chunk in torch.split(numbers.detach().reshape(-1), size):
            # Torch has no way from some eight-bit types to float64 on every device but through float32.
            block = (chunk.float() if chunk.element_size() == 1 else chunk).to(wide)
            if device == "cpu":  # of a copy, since a storage that NumPy has seen cannot change its size
                yield (block.clone() if block is chunk else block).numpy()
            else:
                yield block

    def leading_bits(self, block: Tensor, bits: int) -> tuple[Tensor, int]:
        """Return exponents and first bits of mantissas of magnitudes, as integers, and those of 1."""
        # Widths of the mantissa and biases of the exponent, by IEEE 754.
        is_double = block.dtype == torch.float64
        integer_type, mantissa, bias = (torch.int64, 52, 1023) if is_double else (torch.int32, 23, 127)
        return block.abs().view(integer_type) >> (mantissa - bits), bias << bits

    def counts(self, indices: Tensor, total: int) -> Tensor:
        """Return how often each index occurs; torch.bincount would wait for the device."""
        zeros = indices.new_zeros(total)
        return zeros.scatter_add_(0, indices, indices.new_ones(1).expand_as(indices))

    def total(self, numbers: Tensor) -> Tensor:
        return numbers.sum(dtype=torch.float32) if numbers.element_size() < 4 else numbers.sum()

    def checksum(self, x: Tensor) -> float:
        is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.dtype is torch.float32
        if is_plain and x.layout is torch.strided and not (x.is_meta or x.is_nested):  # a hot path
            return float(x.sum().item())
        return super().checksum(x)

    def bytes_at(self, x: Tensor, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        return rows_of_bytes(resolved(x))[torch.from_numpy(positions).to(x.device)].cpu().numpy()

    def with_bytes(self, x: Tensor, positions: NDArray[np.int64], rows: NDArray[np.uint8]) -> Tensor:
        """Return a copy, in the order of memory of `x`, with other bytes in the elements at positions."""
        plain = resolved(x)
        copy = plain.clone(memory_format=torch.contiguous_format)
        indices = torch.from_numpy(positions).to(x.device)
        rows_of_bytes(copy)[indices] = torch.from_numpy(np.array(rows)).to(x.device)
        # empty_like keeps the strides, which the next op may rely on.
        result: Tensor = distributed(torch.empty_like(plain).copy_(copy), x, placed=True)
        return result

    def memory(self, x: Any) -> tuple[Hashable, Save] | None:
        """Return a key of a dense tensor's storage, and a function that copies it; else None."""
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta:
            return None
        try:
            storage = x.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
            return None
        # The address of the storage object tells views of one memory; data_ptr differs among views.
        return (storage._cdata, partial(_save_storage, x)) if storage.nbytes() else None

    def cast(self, value: Any, like: Tensor) -> Tensor:
        """Return a value as a tensor like another; replicated on each rank beside a DTensor."""
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            # A tensor made in inference mode could not be used by autograd later.
            tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
            result: Tensor = distributed(tensor, like)
            return result

    def beside(self, array: Any, neighbour: Tensor) -> Tensor:
        return torch.as_tensor(array, device=neighbour.device)

    def flat(self, arrays: Sequence[Tensor]) -> Tensor:
        first, *rows = (array.to(arrays[0].device).reshape(-1) for array in arrays)
        return torch.cat([first, *rows]) if rows else first

    def keep_mask_of_highest(self, scores: Tensor, count: int) -> Tensor:
        """Return False for the `count` lowest of scores in one row, True for the others.

        Of equal scores those are dropped that `torch.topk` picks, as in torch.nn.utils.prune.  On a CPU topk
        needs six times the memory of the scores, so it is asked only where equal ones leave a choice.
        """
        if count and scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
            # A copy, since partition works in place.
            ordered = scores.clone().numpy()
            ordered.partition(count - 1)
            dropped = scores <= float(ordered[count - 1])
            # Without ties at the threshold the answer is the same as topk's.
            if int(dropped.count_nonzero()) == count:
                return dropped.logical_not_()
        mask = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
        mask[scores.topk(count, largest=False).indices] = False
        return mask

    def ranks(self, values: Tensor) -> Tensor:
        return values.argsort(dim=-1, stable=True).argsort(dim=-1)

    def detach(self, x: Tensor) -> Tensor:
        return x.detach()

    def wide(self, x: Tensor) -> Tensor:
        return x.float() if x.element_size() < 4 else x

    def round(self, x: Tensor) -> Tensor:
        return x.round()

    def where(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x.where(distributed(condition, x), y)

    def minimum(self, x: Tensor, y: Any) -> Tensor:
        return x.clamp(max=y)

    def maximum(self, x: Tensor, y: Any) -> Tensor:
        return x.clamp(min=y)

    def within(self, value: Tensor, x: Tensor, low: float, high: float) -> Tensor:
        """Return a value, and 0 where x is not between two bounds; comparisons would be slow on the host."""
        result: Tensor = torch.ops.aten.hardtanh_backward(value, x, low, high)
        return result

    def sum(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.sum(dim=tuple(axes)) if axes else x

    def extent(self, x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
        x = x.detach()
        if len(axes) == x.dim():
            least, most = x.aminmax()
            return least, most
        return x.amin(dim=tuple(axes)), x.amax(dim=tuple(axes))  # aminmax over axes takes 20 times as long

    def is_dense(self, x: Tensor) -> bool:
        """Return True for a strided tensor with elements that can be read, and that wait for no reduction."""
        if self.unread(x) is not None or is_partial(x):
            return False
        has_storage = x.layout is torch.strided and not (x.is_nested or x.is_quantized)
        return has_storage and x.numel() > 0

    def with_gradient(
        self, forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Tensor],
        collect: Callable[..., None] | None = None,
    ) -> Tensor:  # fmt: skip
        result: Tensor = _function_with_gradient().apply(forward, backward, *tensors)
        return result

    def state(self, value: Any, like: Any, trained: bool, dtype: str = "float32") -> Tensor:
        """Return a number, an array or a tensor as state beside a tensor; a Parameter if it is trained."""
        with torch.inference_mode(False):
            tensor = torch.as_tensor(value, dtype=getattr(torch, dtype), device=like.device).detach().clone()
            return torch.nn.Parameter(tensor) if trained else tensor

    def update(self, former: Tensor, value: Tensor) -> Tensor:
        """Write values into a parameter and return it; return the values if shape, device or type differ."""
        if (former.shape, former.device, former.dtype) != (value.shape, value.device, value.dtype):
            return value
        self.assign(former, value)
        return former

    def assign(self, state: Tensor, value: Any) -> None:
        # A leaf that requires a gradient refuses to be written into otherwise.
        with torch.no_grad():
            state.copy_(torch.as_tensor(value, dtype=state.dtype, device=state.device))


def _save_storage(x: Tensor) -> Callable[[], None]:
    """Copy the storage of a tensor; return a function that restores it, past autograd's counts of writes."""
    with torch.inference_mode(False):
        # A view of the whole storage in bytes: writing it counts no write of the user's tensor.
        memory = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    copy = memory.clone()

    def restore() -> None:
        # A storage that changed its size meanwhile is left.
        if memory.untyped_storage().nbytes() == len(copy) and not torch.equal(memory, copy):
            memory.copy_(copy)

    return restore


@cache
def _function_with_gradient() -> Any:
    """Return a class of autograd.Function that calls `forward` and `backward`, which it is applied to."""

    class FunctionWithGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, forward: Any, backward: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            ctx.backward_of_tensors = backward
            return forward(*tensors)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Any) -> Any:
            # What computes the gradients is a tool's, and no op of the program.
            with amanda.disabled():
                return None, None, *ctx.backward_of_tensors(gradient, *ctx.saved_tensors)

    return FunctionWithGradient
