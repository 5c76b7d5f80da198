"""Operations of the core on MindSpore's tensors: isolation from autodiff, gradients, signatures, writes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

import mindspore
from amanda.backend import complex_error, dtype_error, shape_error, when_imported
from amanda.errors import RoutineError
from mindspore import Parameter, Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as executor


class StraightThroughFunction(_Function):  # type: ignore[misc]
    """Returns a routine's value, and passes the gradient unchanged to the original value."""

    @staticmethod
    def forward(ctx: Any, original: Any, value: Any) -> Any:
        """Return the value."""
        return ops.stop_gradient(value)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the gradient for the original, and None for the value."""
        return grad, None


class GradientsOff:
    """Context in which autodiff records nothing."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        # MindSpore's switch does not nest, so its former value is put back.
        self._before = executor.enable_grad()
        executor.set_enable_grad(False)

    def __exit__(self, *_: object) -> None:
        executor.set_enable_grad(self._before)


def unrecorded() -> AbstractContextManager[None]:
    """Return a context for writes that autodiff does not record."""
    # Outside of a gradient autodiff stays on: MindSpore refuses to write a view of another mode.
    return GradientsOff() if executor.requires_grad() else nullcontext()


class MindSporeTensorOps:
    """Operations of the core on MindSpore's tensors: its `TensorOps`."""

    def is_tensor(self, value: Any) -> bool:
        """Return True if a value is a Tensor or a Parameter."""
        return isinstance(value, Tensor)

    def without_autodiff(self) -> GradientsOff:
        """Return a context in which autodiff records nothing."""
        return GradientsOff()

    def version(self, value: Any) -> Any:
        """Return MindSpore's count of a tensor's writes; for a list, that of each tensor; else None."""
        if isinstance(value, Tensor):
            return value._version
        if isinstance(value, (list, tuple)):
            return [self.version(element) for element in value if isinstance(element, Tensor)] or None
        return None

    def call_without_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine where autodiff records nothing; a hot path."""
        if not executor.requires_grad():
            return func(*values, **kwargs)
        with GradientsOff():
            return func(*values, **kwargs)

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` in the floating type of `original`, which gets its gradient straight through.

        Without a graph where no gradient is taken.  Raises RoutineError for another shape or kind.
        """
        with GradientsOff():
            value = _cast_like(original, value)
        if original._requires_grad and executor.requires_grad():
            return StraightThroughFunction.apply(original, value)
        return _detach(value)

    def write(self, target: Any, value: Any, isolated: bool) -> None:
        """Copy a value into the user's tensor; if isolated, autodiff does not record the write.

        Raises RoutineError for a value that is no tensor, or has another shape or, if isolated, kind.
        """
        if not isinstance(value, Tensor):
            raise RoutineError(f"a tensor is to be written, not {type(value).__name__}")
        if not isolated:  # the value of a differentiable routine: gradients reach the routine's inputs
            _check_shape(target, value)
            copy_into(target, value)
            return
        with unrecorded():
            copy_into(target, _cast_like(target, value))

    def detach_value(self, value: Any) -> Any:
        """Return a tensor, or a list of tensors, without its graph; a leaf, as a parameter, unchanged."""
        if isinstance(value, Tensor):
            return _detach(value)
        if isinstance(value, (list, tuple)) and any(isinstance(element, Tensor) for element in value):
            return [self.detach_value(element) for element in value]
        return value

    def differentiable_copy(self, value: Any) -> Any:
        """Return a differentiable copy of a tensor; any other value as it is."""
        return ops.Identity()(value) if isinstance(value, Tensor) else value

    def signature(self, inputs: Sequence[Any]) -> Hashable:
        """Return dtype and rank of each tensor, also in lists; None for other values."""
        return tuple([_signature(value) for value in inputs])

    def shapes(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of each tensor, also in lists; None for other values."""
        return tuple([_shape(value) for value in inputs])

    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors need a gradient, as bits; None if no node is created.

        The bits of a call's arguments equal those of its inputs, which a kernel gets as a list.
        """
        if not executor.requires_grad():
            return None
        # A leading 1 keeps leading zeros apart.
        bits = 1
        for value in inputs:
            if isinstance(value, Tensor):
                bits = bits << 1 | value._requires_grad
            elif isinstance(value, (list, tuple)):
                for tensor in tensors_of(value):
                    bits = bits << 1 | tensor._requires_grad
        # A power of two has the leading 1 alone: no tensor needs a gradient.
        return None if bits & (bits - 1) == 0 else bits


def tensors_of(values: Any) -> list[Any]:
    """Return the tensors among values, also in lists."""
    tensors: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_of(value)
    return tensors


def memory_of(value: Any) -> int:
    """Return the address of the memory that a tensor and its views lie in."""
    return int(value.untyped_storage().data_ptr())


def copy_into(target: Any, value: Any) -> None:
    """Copy a value into a tensor's memory, also into a view of a part of it."""
    # `copy_` raises, or writes nothing, for a view of a part of its memory. An assignment to the only element
    # of a new first axis writes each element in its place.
    if target.untyped_storage().size() == target.nbytes and target.is_contiguous():
        target.copy_(value)
    else:
        target.expand_dims(0)[0] = value


def _signature(value: Any) -> Hashable:
    """Return dtype and rank of a tensor, or of each tensor in a list; None for other values."""
    if isinstance(value, Tensor):
        return value.dtype, len(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple([_signature(element) for element in value])
    return None


def _shape(value: Any) -> Hashable:
    """Return the shape of a tensor, or of each tensor in a list; None for other values."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, (list, tuple)):
        return tuple([_shape(element) for element in value])
    return None


def _detach(value: Any) -> Any:
    # A leaf has no graph to be cut off from, and has to stay the object that the program knows.
    return ops.stop_gradient(value) if value._requires_grad and not value._is_leaf else value


def _check_shape(original: Any, value: Any) -> None:
    """Raise RoutineError if the shape of `value` is not that of `original`."""
    if tuple(original.shape) != tuple(value.shape):
        raise shape_error(tuple(value.shape), tuple(original.shape))


_COMPLEX = (mstype.complex64, mstype.complex128)
_FLOATING = (mstype.float16, mstype.bfloat16, mstype.float32, mstype.float64, *_COMPLEX)


def _cast_like(original: Any, value: Any) -> Any:
    """Return `value` in the floating type of `original`.  Raises RoutineError for another shape or kind."""
    _check_shape(original, value)
    original_dtype, value_dtype = original.dtype, value.dtype
    if (original_dtype in _COMPLEX) != (value_dtype in _COMPLEX):
        raise complex_error(value_dtype, original_dtype)
    if original_dtype != value_dtype and original_dtype in _FLOATING:
        if value_dtype not in _FLOATING:
            raise dtype_error(value_dtype, original_dtype)
        return value.astype(original_dtype)
    return value


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, Tensor) else Tensor(np.asarray(value))


def _assign(variable: Any, value: Any) -> None:
    variable.set_data(Tensor(np.asarray(value)).astype(variable.dtype))


def _count_nonzero(tensor: Any) -> int:
    return int(np.count_nonzero(tensor.asnumpy()))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "array": _as_tensor,
    "asarray": _as_tensor,
    "to_numpy": lambda tensor: tensor.asnumpy(),
    "assign": _assign,
    "count_nonzero": _count_nonzero,
    **{
        name: getattr(ops, name)
        for name in ("abs", "exp", "isfinite", "isinf", "isnan", "log", "matmul", "maximum", "minimum",
                     "mul", "ones_like", "reshape", "round", "sign", "sqrt", "square", "tanh", "where",
                     "zeros_like", "broadcast_to", "argsort", "moveaxis")
        if hasattr(ops, name)
    },
    **{
        # The default argument binds the name of this iteration.
        name: (lambda tensor, *args, _name=name, **kwargs: getattr(tensor, _name)(*args, **kwargs))
        for name in ("all", "any", "max", "mean", "min", "prod", "sum")
    },
}  # fmt: skip
"""By autoray's name."""


def register_when_imported() -> None:
    """Register the functions with autoray, now or once it is imported."""
    when_imported("autoray", _register_functions)


def _register_functions() -> None:
    """Register parameters with autoray as tensors of MindSpore, and FUNCTIONS as its functions."""
    import autoray

    # The class of parameters is made at run time, and says that it is of another module.
    autoray.register_backend(Parameter._get_base_class(Tensor), mindspore.__name__)
    for name, function in FUNCTIONS.items():
        autoray.register_function(mindspore.__name__, name, function)
