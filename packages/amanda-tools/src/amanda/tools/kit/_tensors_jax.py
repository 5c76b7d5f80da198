"""Arrays of JAX, and symbols of programs that are traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from amanda.tools.kit._requirements import RequiredNames
from amanda.tools.kit._tensors import Tensors

_REQUIRED = RequiredNames(
    "amanda.tools.kit", "jax", "jax._src.core:eval_trace", "jax._src.core:set_current_trace"
)


class JaxParameter:
    """An array of a tool that an optimizer trains; a reference of JAX holds it, which programs read.

    shape, dtype: those of the array.
    """

    trainable = True

    def __init__(self, value: Any) -> None:
        self._reference = JaxTensors().reference(value)
        self.shape, self.dtype = self._reference.shape, self._reference.dtype

    @property
    def value(self) -> Any:
        """The array as it is now; its symbol where a program is traced."""
        return self._reference[...]

    def assign(self, value: Any) -> None:
        """Put another array of the parameter's shape in its place; raise ValueError for another shape."""
        if np.shape(value) != self.shape:
            raise ValueError(f"a parameter of shape {self.shape} is given an array of {np.shape(value)}")
        is_like = getattr(value, "dtype", None) == self.dtype  # then it stays on its device
        self._reference[...] = value if is_like else np.asarray(value, self.dtype)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        with outside_of_programs():
            return np.asarray(self.value).__array__(*args, **kwargs)


def outside_of_programs() -> AbstractContextManager[Any]:
    """Return a context in which JAX computes, and that adds nothing to a program which is traced."""
    _REQUIRED.check()
    from jax._src import core

    context: AbstractContextManager[Any] = core.set_current_trace(core.eval_trace)
    return context


class JaxTensors(Tensors):
    """Arrays of JAX, computed with in NumPy, as where a program calls routines back; symbols in JAX.

    XLA divides and fuses as it likes, so that a value half way between two integers would round otherwise.
    """

    def reference(self, value: Any) -> Any:
        """Return a reference of JAX to an array."""
        import jax

        with outside_of_programs():
            return jax.new_ref(jax.numpy.array(value))

    def cast(self, value: Any, like: Any) -> Any:
        """Return a number or an array in the element type of an array."""
        return _library(value, like).asarray(value).astype(like.dtype)

    def detach(self, x: Any) -> Any:
        """Return a value through which no gradient goes."""
        import jax

        return jax.lax.stop_gradient(x)

    def wide(self, x: Any) -> Any:
        """Return a value in float32, or in its own type if that is wider."""
        array = _library(x).asarray(x)
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)

    def ranks(self, values: Any) -> Any:
        """Return the rank of each value along the last axis, 0 for the lowest; equal ones in order."""
        library = _library(values)
        return library.argsort(library.argsort(values, -1, stable=True), -1, stable=True)

    def round(self, x: Any) -> Any:
        """Return the nearest integers, half to even."""
        return _library(x).rint(x)

    def floor(self, x: Any) -> Any:
        """Return the integers below."""
        return _library(x).floor(x)

    def absolute(self, x: Any) -> Any:
        """Return magnitudes."""
        return _library(x).abs(x)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Return elements of x where the condition holds, else of y."""
        return _library(condition, x, y).where(condition, x, y)

    def minimum(self, x: Any, y: Any) -> Any:
        """Return the smaller of each pair; y may be a number."""
        return _library(x, y).minimum(x, y)

    def maximum(self, x: Any, y: Any) -> Any:
        """Return the larger of each pair; y may be a number."""
        return _library(x, y).maximum(x, y)

    def within(self, value: Any, x: Any, low: float, high: float) -> Any:
        """Return a value, and 0 where x is not between two bounds."""
        return _library(value, x).where((x <= low) | (x >= high), value * 0, value)

    def sum(self, x: Any, axes: Sequence[int]) -> Any:
        """Return the sum over axes."""
        return _library(x).sum(x, axis=tuple(axes))

    def extent(self, x: Any, axes: Sequence[int]) -> tuple[Any, Any]:
        """Return the least and the largest elements over axes."""
        library = _library(x)
        return library.min(x, axis=tuple(axes)), library.max(x, axis=tuple(axes))

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        """Return the same elements in another shape."""
        return _library(x).reshape(x, tuple(shape))

    def with_gradient(
        self, forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Any],
        collect: Callable[..., None] | None = None,
    ) -> Any:  # fmt: skip
        """Return `forward(*tensors)`, whose gradients are `backward(gradient, *tensors)`."""
        import jax

        computed = jax.custom_vjp(forward)
        computed.defvjp(lambda *xs: (forward(*xs), xs), lambda xs, gradient: tuple(backward(gradient, *xs)))
        return computed(*tensors)

    def state(self, value: Any, like: Any, trained: bool, dtype: str = "float32") -> Any:
        """Return a number or an array as an array of NumPy, or as a parameter that an optimizer may train."""
        array = np.asarray(value) if isinstance(value, JaxParameter) else value
        state = super().state(array, like, trained, dtype)
        return JaxParameter(state) if trained else state

    def update(self, former: Any, value: Any) -> Any:
        """Return former state with other values; these where they do not fit."""
        if not isinstance(former, JaxParameter):
            return super().update(former, value)
        if (former.shape, former.dtype) == (value.shape, value.dtype):
            former.assign(value.value)
            return former
        return value

    def assign(self, state: Any, value: Any) -> None:
        """Write new values into state."""
        if isinstance(state, JaxParameter):
            state.assign(np.reshape(value, state.shape))
        else:
            super().assign(state, value)

    def read(self, state: Any) -> Any:
        """Return state as an array to compute with."""
        return state.value if isinstance(state, JaxParameter) else state


def _library(*values: Any) -> Any:
    """Return jax.numpy if one of some values is a symbol, else NumPy."""
    import jax

    return jax.numpy if any(isinstance(value, jax.core.Tracer) for value in values) else _NumpyOnHost()


class _NumpyOnHost:
    """NumPy, whose functions are given arrays of NumPy: an array of JAX would compute itself."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)

        def call(*values: Any, **options: Any) -> Any:
            import jax

            arrays = (np.asarray(value) if isinstance(value, jax.Array) else value for value in values)
            return function(*arrays, **options)

        return call
