"""Tensor primitives: isolation from autodiff, the straight-through edge, signatures."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from amanda.errors import RoutineError
from mindspore import Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as executor


class StraightThrough(_Function):  # type: ignore[misc]
    """A routine's value in the place of an original: the gradient goes to the original as it is."""

    @staticmethod
    def forward(ctx: Any, original: Any, value: Any) -> Any:
        """The value."""
        return ops.stop_gradient(value)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient, for the original alone."""
        return grad, None


class GradOff:
    """Context in which autodiff records nothing."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = executor.enable_grad()
        executor.set_enable_grad(False)

    def __exit__(self, *_: object) -> None:
        executor.set_enable_grad(self._before)


def unrecorded() -> AbstractContextManager[None]:
    """Return a context for writes that autodiff does not record.

    Outside of a gradient it does nothing: MindSpore refuses views that were made in another mode than writes.
    """
    return GradOff() if executor.requires_grad() else nullcontext()


class MindSporeTensors:
    """`TensorOps` of MindSpore."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a Tensor or a Parameter."""
        return isinstance(value, Tensor)

    def isolated(self) -> GradOff:
        """Context in which autodiff records nothing."""
        return GradOff()

    def version(self, value: Any) -> Any:
        """Return how often a tensor was written, as MindSpore counts it; of each tensor, for a list."""
        if isinstance(value, Tensor):
            return value._version
        if isinstance(value, (list, tuple)):
            return [self.version(one) for one in value if isinstance(one, Tensor)] or None
        return None

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine where autodiff records nothing; a hot path."""
        if not executor.requires_grad():
            return func(*values, **kwargs)
        with GradOff():
            return func(*values, **kwargs)

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value` for `original`, in its floating type, with its gradient passed straight through."""
        with GradOff():
            value = _fitting(original, value)
        if original._requires_grad and executor.requires_grad():
            return StraightThrough.apply(original, value)
        return _detached(value)

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor; where isolated, gradients pass as if nothing was written."""
        if not isinstance(value, Tensor):
            raise RoutineError(f"a tensor is to be written, not {type(value).__name__}")
        if not isolated:
            copy_into(target, _same_shape(target, value))
            return
        with unrecorded():
            copy_into(target, _fitting(target, value))

    def kept(self, value: Any) -> Any:
        """A tensor without its graph; a leaf, such as a parameter, as it is."""
        if isinstance(value, Tensor):
            return _detached(value)
        if isinstance(value, (list, tuple)) and any(isinstance(one, Tensor) for one in value):
            return [self.kept(one) for one in value]
        return value

    def copied(self, value: Any) -> Any:
        """A differentiable copy."""
        return ops.Identity()(value) if isinstance(value, Tensor) else value

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """dtype and rank of each tensor, also in lists."""
        return tuple([_signature(value) for value in inputs])

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Shape of each tensor, also in lists."""
        return tuple([_shape(value) for value in inputs])

    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors need a gradient, as bits; None where no node is made.

        The same for a call's arguments as for its inputs, which may be in a list of their own.
        """
        if not executor.requires_grad():
            return None
        bits = 1
        for value in inputs:
            if isinstance(value, Tensor):
                bits = bits << 1 | value._requires_grad
            elif isinstance(value, (list, tuple)):
                for one in tensors_of(value):
                    bits = bits << 1 | one._requires_grad
        return None if bits & (bits - 1) == 0 else bits

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """An op's result as a list of outputs, and how to put such a list back into its form."""
        if isinstance(outputs, (list, tuple)):
            kind = type(outputs)
            made = getattr(kind, "_make", kind)
            return list(outputs), made
        if outputs is None:
            return [], _nothing
        return [outputs], _only


def tensors_of(values: Any) -> list[Any]:
    """The tensors among values, those in lists too."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
    return found


def memory_of(value: Any) -> int:
    """Return the address of the memory that a tensor and its views lie in."""
    return int(value.untyped_storage().data_ptr())


def copy_into(target: Any, value: Any) -> None:
    """Copy a value into a tensor's memory.

    `copy_` raises, or writes nothing, for a view of a part of its memory; an assignment to an element of a
    view of all of it writes each element where it lies.
    """
    if target.untyped_storage().size() == target.nbytes and target.is_contiguous():
        target.copy_(value)
    else:
        target.expand_dims(0)[0] = value


def _only(values: list[Any]) -> Any:
    return values[0]


def _nothing(values: list[Any]) -> None:
    return None


def _signature(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.dtype, len(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple([_signature(one) for one in value])
    return None


def _shape(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple([_shape(one) for one in value])
    return None


def _detached(value: Any) -> Any:
    return ops.stop_gradient(value) if value._requires_grad and not value._is_leaf else value


def _same_shape(original: Any, value: Any) -> Any:
    if tuple(original.shape) != tuple(value.shape):
        raise RoutineError(
            f"a routine returned shape {tuple(value.shape)} where shape {tuple(original.shape)} was given; "
            "mark it @amanda.differentiable if it is meant to change shapes"
        )
    return value


_COMPLEX = (mstype.complex64, mstype.complex128)
_FLOATING = (mstype.float16, mstype.bfloat16, mstype.float32, mstype.float64, *_COMPLEX)


def _fitting(original: Any, value: Any) -> Any:
    _same_shape(original, value)
    wanted, found = original.dtype, value.dtype
    if (wanted in _COMPLEX) != (found in _COMPLEX):
        raise RoutineError(
            f"a routine returned {found} where {wanted} was given; it may not turn real into complex or back"
        )
    if wanted != found and wanted in _FLOATING:
        if found not in _FLOATING:
            raise RoutineError(f"a routine returned {found} where {wanted} was given; return a floating type")
        return value.astype(wanted)
    return value
