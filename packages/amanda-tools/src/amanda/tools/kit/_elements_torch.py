"""Elements of PyTorch tensors of every layout and class, and of values that transforms have wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amanda.tools.kit._tensors import RequiredNames, Samples
from amanda.tools.mapping import local, torch_dtype, whole

FREED = "its memory was freed, as FSDP does between uses"
_DECIDES_ITSELF = "says itself what operations do, and tools call none of it"
_FUNCTIONS = (
    "_add_batch_dim", "get_unwrapped", "is_batchedtensor", "is_functorch_wrapped_tensor",
    "maybe_get_bdim", "maybe_get_level", "peek_interpreter_stack", "pop_dynamic_layer_stack",
    "push_dynamic_layer_stack",
)  # fmt: skip
_REQUIRED = RequiredNames(
    "amanda.tools.kit", "torch", *(f"torch:_C._functorch.{name}" for name in _FUNCTIONS)
)


def resolved(x: Tensor) -> Tensor:
    """Return a dense tensor without autograd, with conjugation and negation carried out."""
    plain: Tensor = whole(x.detach()).resolve_conj().resolve_neg()
    return plain if plain.layout is torch.strided else plain.to_dense()


def is_wrapped(x: Tensor) -> bool:
    """Return True for a value of a transform, whose elements may be those of many calls."""
    # vmap and grad wrap tensors of class torch.Tensor, so the class does not tell.
    functions = torch._C._functorch
    return functions.is_functorch_wrapped_tensor(x) or functions.is_legacy_batchedtensor(x)


def is_freed(x: Tensor) -> bool:
    """Return True if the program has freed elements, where torch itself would read past the storage's end."""
    try:
        capacity, span = x.untyped_storage().nbytes(), x.numel()
        if span and not x.is_contiguous():
            span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return span > 0 and (x.storage_offset() + span) * x.element_size() > capacity
    except (NotImplementedError, RuntimeError):  # a layout, or a device, without storages
        return False


def why_unread(x: Tensor) -> str | None:
    """Return why a tensor of a subclass cannot be read, without a call of what the subclass overrides.

    None for a tensor that can be read, and for a DTensor, of which the shard is read.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    tensor_class = type(x)
    if isinstance(x, FakeTensor):
        return "it has a shape and no elements, as a FakeTensor"
    name = torch_dtype(x)
    # The mapping marks a class that says itself what ops do by brackets.
    if name is None or name.endswith("]"):
        is_packed = hasattr(tensor_class, "__tensor_flatten__")
        return f"it is packed, {name}" if is_packed else f"{tensor_class.__name__} {_DECIDES_ITSELF}"
    # A DTensor or the result of a collective: what this process holds is read, as a rule a plain tensor.
    if local(x) is not x:
        return None
    # A subclass may count or refuse reads of its attributes, which belong to the program.
    with torch._C.DisableTorchFunctionSubclass():
        try:
            if x.is_meta:
                return "it has a shape and no elements, on the device meta"
            # A wrapper has a shape but no memory: reading address 0 would crash the process.
            if x.layout is torch.strided and not x.is_nested and x.numel() and not x.data_ptr():
                return f"{tensor_class.__name__} has no elements of its own"
            return None if x.is_nested or not is_freed(x) else FREED
        except Exception as error:  # whatever a class refuses
            return f"{tensor_class.__name__} refuses to be read: {error}"


def stored(x: Tensor) -> Tensor:
    """Return what this process holds of a tensor, with numbers in the place of quantised ones."""
    x = local(x)
    return x.dequantize() if x.is_quantized else x


def stored_elements(x: Tensor) -> Tensor:
    """Return the elements that a sparse or a nested tensor stores."""
    if x.is_nested and x.layout is torch.strided:
        return torch.cat([component.reshape(-1) for component in x.unbind()])
    if x.layout is torch.sparse_coo:
        # Duplicate entries of one place are summed, as the program sees them.
        x = x.coalesce()
    return x.values() if hasattr(x, "values") else x.to_dense()


def rows_of_bytes(x: Tensor) -> Tensor:
    """Return the bytes of each element, a view if the tensor is contiguous."""
    return x.contiguous().view(-1, 1).view(torch.uint8)


class TorchSamples(Samples):
    """The samples of a tensor that transforms of torch.func have wrapped."""

    def __init__(self, x: Tensor) -> None:
        _REQUIRED.check()
        functions: Any = torch._C._functorch
        self._functions = functions
        axes: dict[int, int] = {}
        while functions.is_functorch_wrapped_tensor(x):
            if functions.is_batchedtensor(x):
                axis = functions.maybe_get_bdim(x)
                # An inner layer has the axes of outer batches too, which shift from its axis on.
                axes = {level: place + (place >= axis) for level, place in axes.items()}
                axes[functions.maybe_get_level(x)] = axis
            x = functions.get_unwrapped(x)
        # Levels count from the outermost transform.
        self.levels = tuple(sorted(axes))
        with torch.no_grad(), self.outside():
            data = x.detach().movedim([axes[level] for level in self.levels], [*range(len(axes))])
        self.data, self.sizes = data, tuple(data.shape[: len(axes)])

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leave all transforms within the context."""
        stack: list[Any] = []
        try:
            while self._functions.peek_interpreter_stack() is not None:
                stack.append(self._functions.pop_dynamic_layer_stack())
            yield
        finally:
            while stack:  # the outermost, which was left last, comes first
                self._functions.push_dynamic_layer_stack(stack.pop())

    def wrapped(self, data: Tensor) -> Tensor:
        """Return data with axes of samples in front as one value under the transforms."""
        # Each call takes the axis in front, so that the batches come in the order of the levels.
        for level in self.levels:
            data = self._functions._add_batch_dim(data, 0, level)
        return data
