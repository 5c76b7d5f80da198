"""Primitives of the fake framework's tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from amanda.backend import TensorOps
from amanda.errors import RoutineError
from amanda.testing import fake
from amanda.testing.fake import Tensor, _autograd


class FakeTensors(TensorOps):
    """The fake framework's tensors, and its tape."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a tensor."""
        return isinstance(value, Tensor)

    def isolated(self) -> AbstractContextManager[Any]:
        """Context in which the tape takes nothing."""
        context: AbstractContextManager[Any] = fake.no_grad()
        return context

    def version(self, value: Any) -> Any:
        """Return how often a tensor was written into; of each, for a list."""
        return _each(value, lambda tensor: tensor.version)

    def straight_through(self, original: Tensor, value: Tensor) -> Tensor:
        """`value` with an edge of the tape to `original`."""
        fitted = _fitting(original, value)
        _autograd.record("StraightThrough", [original], [fitted], lambda grads: grads)
        return fitted

    def write(self, target: Tensor, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor."""
        fitted = _fitting(target, value)
        target.assign(fitted)
        if not isolated and value.requires_grad:
            _autograd.record("CopyBackward", [value], [target], lambda grads: grads)

    def storable(self, value: Any) -> Any:
        """A tensor off the tape, or a leaf as it is."""
        if isinstance(value, Tensor):
            return value if value.is_leaf else value.detach()
        return [self.storable(tensor) for tensor in value] if isinstance(value, (list, tuple)) else value

    def copied(self, value: Any) -> Any:
        """A copy that the tape knows."""
        if not isinstance(value, Tensor):
            return value
        copy = value.detach()
        _autograd.record("CopyBackward", [value], [copy], lambda grads: grads)
        return copy

    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors require a gradient."""
        needs = tuple(_each(value, lambda tensor: tensor.requires_grad) for value in inputs)
        return needs if fake.is_grad_enabled() and "True" in str(needs) else None

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype and rank of each tensor."""
        return tuple(_each(value, lambda tensor: (tensor.dtype, len(tensor.shape))) for value in inputs)

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of each tensor."""
        return tuple(_each(value, lambda tensor: tensor.shape) for value in inputs)


def _each(value: Any, read: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return read(value)
    if isinstance(value, (list, tuple)):
        return tuple(read(tensor) for tensor in value if isinstance(tensor, Tensor)) or None
    return None


def _fitting(original: Tensor, value: Tensor) -> Tensor:
    """A copy of a value in the type of an original."""
    if value.shape != original.shape:
        raise RoutineError(
            f"a routine returned shape {value.shape} where shape {original.shape} was given; mark it "
            "@amanda.differentiable if it is meant to change shapes"
        )
    if (value.dtype == "complex128") != (original.dtype == "complex128"):
        raise RoutineError(f"a routine returned {value.dtype} where {original.dtype} was given")
    return value.astype(original.dtype)
