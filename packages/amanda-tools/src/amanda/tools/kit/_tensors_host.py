"""Arrays of JAX and tensors of MindSpore, computed with in NumPy on the host; symbols of JAX, in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.kit._tensors import Array, RequiredNames, Tensors
from amanda.tools.libraries import register_backend

_REQUIRED_JAX = RequiredNames(
    "amanda.tools.kit", "jax", "jax._src.core:eval_trace", "jax._src.core:set_current_trace"
)
_REQUIRED_MINDSPORE = RequiredNames(
    "amanda.tools.kit", "mindspore", "mindspore.common._grad_function:_Function"
)


class NumpyOnHost:
    """NumPy, whose functions are given arrays of NumPy for tensors: a tensor would compute itself.

    to_array: return an array for a tensor, and any other value as it is.
    """

    def __init__(self, to_array: Callable[[Any], Any]) -> None:
        self._to_array = to_array

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        # Only values that come by position are tensors; options are axes and flags.
        return lambda *values, **options: function(*map(self._to_array, values), **options)


class JaxParameter:
    """An array of a tool that an optimizer trains; a reference of JAX holds it, which programs read."""

    trainable = True

    def __init__(self, value: Any) -> None:
        # A reference, since a compiled program would have a plain array built in as a constant.
        self._reference = JaxTensorLibrary().reference(value)
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


# The class lies in a module of Amanda's, by which autoray would take it for an array of a library `amanda`.
register_backend(JaxParameter, "jax")


def outside_of_programs() -> AbstractContextManager[Any]:
    """Return a context in which JAX computes, and that adds nothing to a program which is traced."""
    _REQUIRED_JAX.check()
    from jax._src import core

    context: AbstractContextManager[Any] = core.set_current_trace(core.eval_trace)
    return context


class JaxTensorLibrary(Tensors):
    """Arrays of JAX, computed with in NumPy, as where a program calls routines back; symbols in JAX.

    XLA divides and fuses as it likes, so that a value half way between two integers would round otherwise.
    """

    def library(self, *values: Any) -> Any:
        """Return jax.numpy if a value is a symbol, else NumPy, whose functions convert arrays of JAX."""
        import jax

        # NumPy cannot compute with symbols.
        if any(isinstance(value, jax.core.Tracer) for value in values):
            return jax.numpy
        return NumpyOnHost(lambda value: np.asarray(value) if isinstance(value, jax.Array) else value)

    def wide(self, x: Any) -> Any:
        return super().wide(self.library(x).asarray(x))

    def reference(self, value: Any) -> Any:
        """Return a reference of JAX that holds an array, which programs read as they run."""
        # Made outside of any program that is traced, which reads it as it runs.
        import jax

        with outside_of_programs():
            return jax.new_ref(jax.numpy.array(value))

    def cast(self, value: Any, like: Any) -> Any:
        return self.library(value, like).asarray(value).astype(like.dtype)

    def detach(self, x: Any) -> Any:
        import jax

        return jax.lax.stop_gradient(x)

    def ranks(self, values: Any) -> Any:
        library = self.library(values)
        return library.argsort(library.argsort(values, -1, stable=True), -1, stable=True)

    def with_gradient(
        self, forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Any],
        collect: Callable[..., None] | None = None,
    ) -> Any:  # fmt: skip
        """Return what `forward` gives, with `backward` for its gradients; nothing goes to `collect`."""
        import jax

        # jax.custom_vjp takes a function that also returns what the gradients need: the values.
        computed = jax.custom_vjp(forward)
        computed.defvjp(lambda *xs: (forward(*xs), xs), lambda xs, gradient: tuple(backward(gradient, *xs)))
        return computed(*tensors)

    def state(self, value: Any, like: Any, trained: bool, dtype: str = "float32") -> Any:
        """Return a number or an array as an array of NumPy, or as a parameter that an optimizer may train."""
        array = np.asarray(value) if isinstance(value, JaxParameter) else value
        state = super().state(array, like, trained, dtype)
        return JaxParameter(state) if trained else state

    def update(self, former: Any, value: Any) -> Any:
        """Write values into a parameter and return it; return the values if shape or type differ."""
        # A parameter is written in place, as the optimizer holds it.
        if not isinstance(former, JaxParameter):
            return super().update(former, value)
        if (former.shape, former.dtype) == (value.shape, value.dtype):
            former.assign(value.value)
            return former
        return value

    def assign(self, state: Any, value: Any) -> None:
        """Put an array into a parameter, in its shape; write into any other state."""
        if isinstance(state, JaxParameter):
            state.assign(np.reshape(value, state.shape))
        else:
            super().assign(state, value)

    def read(self, state: Any) -> Any:
        return state.value if isinstance(state, JaxParameter) else state


class MindSporeTensorLibrary(Tensors):
    """Tensors of MindSpore, computed with in NumPy: the CPU lacks kernels of many of its functions."""

    def library(self, *values: Any) -> Any:
        """Return NumPy, whose functions take arrays for tensors of MindSpore."""
        return NumpyOnHost(lambda value: self.to_numpy(value) if hasattr(value, "asnumpy") else value)

    def wide(self, x: Any) -> Any:
        return super().wide(self.library(x).asarray(x))

    def plain(self, x: Any) -> Array:
        return self.wide(x)

    def to_numpy(self, x: Any) -> NDArray[Any]:
        """Return an array of NumPy, in float32 for bfloat16; other values than tensors become arrays too."""
        if not hasattr(x, "asnumpy"):
            return np.asarray(x)
        import mindspore

        # NumPy has no bfloat16.
        array: NDArray[Any] = (x.astype(mindspore.float32) if x.dtype == mindspore.bfloat16 else x).asnumpy()
        return array

    def copy(self, array: Any) -> Array:
        return np.array(self.to_numpy(array))

    def duplicate(self, x: Any) -> Any:
        """Return the elements as an array of NumPy: the CPU has no kernel of `clone`."""
        return np.array(x.asnumpy()) if hasattr(x, "asnumpy") else x

    def cast(self, value: Any, like: Any) -> Any:
        """Return a value in the element type of another: a tensor beside a tensor, else an array."""
        array = self.to_numpy(value)
        if not hasattr(like, "asnumpy"):
            return array.astype(like.dtype)
        import mindspore

        return mindspore.Tensor(np.ascontiguousarray(array)).astype(like.dtype)

    def detach(self, x: Any) -> Any:
        import mindspore

        return mindspore.ops.stop_gradient(x) if hasattr(x, "asnumpy") else x

    def within(self, value: Any, x: Any, low: float, high: float) -> Any:
        # Both become arrays first, since tensors would compare themselves.
        return super().within(self.to_numpy(value), self.to_numpy(x), low, high)

    def ranks(self, values: Array) -> Array:
        # Not by `library`: MindSpore needs NumPy below 2, whose argsort takes no `stable`.
        return super().ranks(self.to_numpy(values))

    def is_dense(self, x: Any) -> bool:
        return bool(x.size)

    def with_gradient(
        self, forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Any],
        collect: Callable[..., None] | None = None,
    ) -> Any:  # fmt: skip
        """Return what `forward` gives, with `backward` for its gradients, as tensors of the inputs' types."""

        def gradients(gradient: Any, *tensors: Any) -> list[Any]:
            pairs = zip(backward(gradient, *tensors), tensors, strict=True)
            # Gradients are arrays of NumPy so far; MindSpore takes tensors of the inputs' types.
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
        """Write values into a parameter and return it; return the values if shape or type differ."""
        if not hasattr(former, "asnumpy"):
            return super().update(former, value)
        if tuple(former.shape) != tuple(value.shape) or former.dtype != value.dtype:
            return value
        former.set_data(value)
        return former

    def assign(self, state: Any, value: Any) -> None:
        """Put an array into a parameter, in its shape and type; write into any other state."""
        if not hasattr(state, "asnumpy"):
            super().assign(state, self.to_numpy(value))
            return
        state.set_data(self.cast(np.reshape(self.to_numpy(value), tuple(state.shape)), state))


@cache
def _computed_with_gradient() -> Any:
    """Return a class of MindSpore's functions that calls `forward` and `backward`, which it is applied to."""
    _REQUIRED_MINDSPORE.check()
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
