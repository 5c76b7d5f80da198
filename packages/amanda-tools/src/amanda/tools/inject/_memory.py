"""The memory that a program finds when it begins, as of parameters, where no fault is to stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import amanda
from amanda.tools.mapping import backend_of

if TYPE_CHECKING:
    from torch import Tensor


class Kept(Protocol):
    """A piece of memory with a copy of its bytes. key: tells it from others that are alive."""

    key: Any

    def restore(self) -> None:
        """Make every byte what it was."""


class FoundMemory(amanda.Tool):
    """Copies memory that ops of a program read or write and that no op of the program has made.

    `restore` makes every byte of it what it was when the program first met it.
    """

    def __init__(self) -> None:
        self.clear()
        self.add_inst_for_op(self._analyse)

    def clear(self) -> None:
        """Let go of everything."""
        self._found: dict[Any, Kept] = {}
        self._made: set[Any] = set()

    def restore(self) -> None:
        """Put everything back."""
        with amanda.disabled():
            for one in self._found.values():
                one.restore()

    def outlasting(self, value: Any) -> Any:
        """The value with copies of the tensors in it that lie in memory which `restore` writes."""
        if isinstance(value, dict):
            return {key: self.outlasting(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.outlasting(one) for one in value)
        in_found = any(key in self._found for key, _ in _memories([value]))
        return value.clone() if in_found and hasattr(value, "clone") else value

    def _analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._find)
        context.insert_after_op(self._note_made)

    @amanda.observer
    def _find(self, *inputs: Any) -> None:
        for key, keep in _memories(inputs):
            if key not in self._found and key not in self._made:
                self._found[key] = keep()

    @amanda.observer
    def _note_made(self, *outputs: Any) -> None:
        self._made.update(key for key, _ in _memories(outputs) if key not in self._found)


def _memories(values: Any) -> Iterator[tuple[Any, Callable[[], Kept]]]:
    """The key of the memory of each value, also in lists, with what copies it."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _memories(value)
        elif (find := _FINDERS.get(backend_of(value))) is not None:
            yield from find(value)


# ---- PyTorch ----


class _TorchStorage:
    """What a dense tensor lies in, all of it."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = _bytes_of(tensor)
        self.key = self._bytes.untyped_storage()._cdata
        self._copy = self._bytes.clone()

    def restore(self) -> None:
        """Write the bytes that differ, past autograd's counts of writes."""
        import torch

        if self._bytes.untyped_storage().nbytes() == len(self._copy) and not torch.equal(
            self._bytes, self._copy
        ):
            self._bytes.copy_(self._copy)


def _bytes_of(tensor: Tensor) -> Tensor:
    import torch

    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _of_torch(value: Any) -> Iterator[tuple[Any, Callable[[], Kept]]]:
    import torch

    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        return
    try:
        storage = value.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return
    if storage.nbytes():
        yield storage._cdata, lambda: _TorchStorage(value)


# ---- TensorFlow ----


class _Variable:
    """The value that a handle of TensorFlow's leads to."""

    def __init__(self, handle: Any, dtype: Any) -> None:
        import tensorflow as tf

        self._handle = handle
        self._value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        self.key = id(handle)

    def restore(self) -> None:
        """Assign it."""
        import tensorflow as tf

        tf.raw_ops.AssignVariableOp(resource=self._handle, value=self._value)


def _of_tensorflow(value: Any) -> Iterator[tuple[Any, Callable[[], Kept]]]:
    data = getattr(value, "_handle_data", None)
    kinds = getattr(data, "shape_and_type", None)
    if kinds and hasattr(value, "numpy"):
        import tensorflow as tf

        yield id(value), lambda: _Variable(value, tf.dtypes.as_dtype(kinds[0].dtype))


_FINDERS: dict[str, Any] = {"torch": _of_torch, "tensorflow": _of_tensorflow}
