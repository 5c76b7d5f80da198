"""Tensors of MindSpore, computed with in NumPy: the CPU lacks kernels of many of its functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.kit._requirements import RequiredNames
from amanda.tools.kit._tensors import Array, Tensors

_REQUIRED = RequiredNames("amanda.tools.kit", "mindspore", "mindspore.common._grad_function:_Function")


class MindSporeTensors(Tensors):
    """Tensors of MindSpore; what is computed of them are arrays of NumPy, which `cast` makes tensors of."""

    def plain(self, x: Any) -> Array:
        """Return a tensor as an array of NumPy, in float32 or wider."""
        array = self.to_numpy(x)
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)

    def to_numpy(self, x: Any) -> NDArray[Any]:
        """Return an array of NumPy with the same values; in float32 where NumPy lacks the element type."""
        if not hasattr(x, "asnumpy"):
            return np.asarray(x)
        import mindspore

        array: NDArray[Any] = (x.astype(mindspore.float32) if x.dtype == mindspore.bfloat16 else x).asnumpy()
        return array

    def copy(self, array: Any) -> Array:
        """Return a copy to be written into later, an array of NumPy."""
        return np.array(self.to_numpy(array))

    def duplicate(self, x: Any) -> Any:
        """Return the elements as an array of NumPy: the CPU has no kernel of `clone`."""
        return np.array(x.asnumpy()) if hasattr(x, "asnumpy") else x

    def cast(self, value: Any, like: Any) -> Any:
        """Return a number, an array or a tensor in the element type of a tensor or an array."""
        array = self.to_numpy(value)
        if not hasattr(like, "asnumpy"):
            return array.astype(like.dtype)
        import mindspore

        return mindspore.Tensor(np.ascontiguousarray(array)).astype(like.dtype)

    def detach(self, x: Any) -> Any:
        """Return a tensor through which no gradient goes."""
        import mindspore

        return mindspore.ops.stop_gradient(x) if hasattr(x, "asnumpy") else x

    def wide(self, x: Any) -> Any:
        """Return an array in float32, or in the tensor's own type if that is wider."""
        return self.plain(x)

    def round(self, x: Any) -> Any:
        """Return the nearest integers, half to even."""
        return np.rint(self.to_numpy(x))

    def floor(self, x: Any) -> Any:
        """Return the integers below."""
        return np.floor(self.to_numpy(x))

    def absolute(self, x: Any) -> Any:
        """Return magnitudes."""
        return np.abs(self.to_numpy(x))

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Return elements of x where the condition holds, else of y."""
        return np.where(*map(self.to_numpy, (condition, x, y)))

    def minimum(self, x: Any, y: Any) -> Any:
        """Return the smaller of each pair; y may be a number."""
        return np.minimum(self.to_numpy(x), self._beside(y, x))

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the larger of each pair; y may be a number."""
        return np.maximum(self.to_numpy(x), self._beside(y, x))

    def within(self, value: Any, x: Any, low: float, high: float) -> Any:
        """Return a value, and 0 where x is not between two bounds."""
        array, value = self.to_numpy(x), self.to_numpy(value)
        return np.where((array <= low) | (array >= high), value * 0, value)

    def sum(self, x: Any, axes: Sequence[int]) -> Any:
        """Return the sum over axes."""
        return np.sum(self.to_numpy(x), axis=tuple(axes))

    def extent(self, x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
        """Return the least and the largest elements over axes."""
        array = self.to_numpy(x)
        return np.min(array, axis=tuple(axes)), np.max(array, axis=tuple(axes))

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """Return the same elements in another shape."""
        return np.reshape(self.to_numpy(x), tuple(shape))

    def ranks(self, values: Array) -> Array:
        """Return the rank of each value along the last axis, 0 for the lowest; equal ones in order."""
        return super().ranks(self.to_numpy(values))

    def is_dense(self, x: Any) -> bool:
        """Return True for a tensor with elements."""
        return bool(x.size)

    def with_gradient(
        self, forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Any],
        collect: Callable[..., None] | None = None,
    ) -> Any:  # fmt: skip
        """Return `forward(*tensors)`, whose gradients are `backward(gradient, *tensors)`."""

        def gradients(gradient: Any, *tensors: Any) -> list[Any]:
            pairs = zip(backward(gradient, *tensors), tensors, strict=True)
            return [None if grad is None else self.cast(grad, tensor) for grad, tensor in pairs]

        return _computed_with_gradient().apply(forward, gradients, *tensors)

    def state(self, value: Any, like: Any, trained: bool, dtype: str = "float32") -> Any:
        """Return a number, an array or a tensor as an array, or as a parameter that an optimizer trains."""
        array = np.array(self.to_numpy(value), dtype)
        if not trained:
            return array
        import mindspore

        return mindspore.Parameter(mindspore.Tensor(array), name="state")

    def update(self, former: Any, value: Any) -> Any:
        """Return former state with other values; these where they do not fit."""
        if not hasattr(former, "asnumpy"):
            return super().update(former, value)
        if tuple(former.shape) != tuple(value.shape) or former.dtype != value.dtype:
            return value
        former.set_data(value)
        return former

    def assign(self, state: Any, value: Any) -> None:
        """Write new values into state."""
        if not hasattr(state, "asnumpy"):
            super().assign(state, self.to_numpy(value))
            return
        state.set_data(self.cast(np.reshape(self.to_numpy(value), tuple(state.shape)), state))

    def _beside(self, y: Any, x: Any) -> Any:
        """Return y as an array, or the number that it is, which does not widen x."""
        return self.to_numpy(y) if hasattr(y, "shape") else y


@cache
def _computed_with_gradient() -> Any:
    _REQUIRED.check()
    from mindspore.common._grad_function import _Function

    class ComputedWithGradient(_Function):  # type: ignore[misc]
        """A function and the function of its gradients."""

        @staticmethod
        def forward(ctx: Any, forward: Any, backward: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            ctx.backward_of_tensors = backward
            return forward(*tensors)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return None, None, *ctx.backward_of_tensors(gradient, *ctx.saved_tensors)

    return ComputedWithGradient
