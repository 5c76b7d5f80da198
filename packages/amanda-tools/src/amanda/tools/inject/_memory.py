"""The memory that a program finds when it begins, as of parameters, where no fault is to stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.kit._requirements import check
from amanda.tools.mapping import backend_of

if TYPE_CHECKING:
    from torch import Tensor

Restore = Callable[[], None]
Memory = tuple[Any, Callable[[], Restore]]
"""A key that tells memory from other that is alive, and what copies it and returns its `Restore`."""


class FoundMemory(amanda.Tool):
    """Copies memory that ops of a program read or write and that no op of the program has made.

    `restore` makes every byte of it what it was when the program first met it.
    """

    def __init__(self) -> None:
        self.clear()
        self.add_inst_for_op(self._analyse)

    def clear(self) -> None:
        """Forget all memory."""
        self._found: dict[Any, Restore] = {}
        self._made: set[Any] = set()

    def restore(self) -> None:
        """Put everything back."""
        with amanda.disabled():
            for restore in self._found.values():
                restore()

    def outlasting(self, value: Any) -> Any:
        """Return a value with copies of the tensors in it that lie in memory which `restore` writes."""
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
        for key, copied in _memories(inputs):
            if key not in self._found and key not in self._made:
                self._found[key] = copied()

    @amanda.observer
    def _note_made(self, *outputs: Any) -> None:
        self._made.update(key for key, _ in _memories(outputs) if key not in self._found)


def _memories(values: Any) -> Iterator[Memory]:
    """Yield the memory of each value, also of values in lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _memories(value)
        elif (find := _FINDERS.get(backend_of(value))) is not None:
            yield from find(value)


# ---- PyTorch: the storage that a dense tensor lies in, all of it ----


def _of_torch(value: Any) -> Iterator[Memory]:
    import torch

    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        return
    try:
        storage = value.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
        return
    if storage.nbytes():
        check("inject", "torch")
        yield storage._cdata, partial(_copied_storage, value)


def _copied_storage(tensor: Tensor) -> Restore:
    import torch

    with torch.inference_mode(False):
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    copy = whole.clone()

    def restore() -> None:  # past autograd's counts of writes
        if whole.untyped_storage().nbytes() == len(copy) and not torch.equal(whole, copy):
            whole.copy_(copy)

    return restore


# ---- TensorFlow: the value that the handle of a variable leads to ----


def _of_tensorflow(value: Any) -> Iterator[Memory]:
    kinds = getattr(getattr(value, "_handle_data", None), "shape_and_type", None)
    if kinds and hasattr(value, "numpy"):
        yield id(value), partial(_copied_variable, value, kinds[0].dtype)


def _copied_variable(handle: Any, dtype: Any) -> Restore:
    from tensorflow import raw_ops

    value = raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    return partial(raw_ops.AssignVariableOp, resource=handle, value=value)


_FINDERS: dict[str, Any] = {"torch": _of_torch, "tensorflow": _of_tensorflow}
