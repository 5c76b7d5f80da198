"""A primitive that calls Python with arrays of NumPy, of which JAX's runtime knows nothing.

`jax.io_callback` puts what it gives on a device first, for which no thread may be left while a program runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import jax
from jax._src import callback, core, dtypes
from jax._src.interpreters import batching, mlir

call_p = core.Primitive("amanda_call")
call_p.multiple_results = True


def call(function: Callable[..., Any], results: Sequence[Any], *arrays: Any) -> list[Any]:
    """Return what a function gives, of these shapes and dtypes, at each execution of the program."""
    avals = tuple(core.ShapedArray(one.shape, dtypes.canonicalize_dtype(one.dtype)) for one in results)
    return list(call_p.bind(*arrays, function=function, avals=avals))


def _call(*arrays: Any, function: Callable[..., Any], avals: Any) -> list[Any]:
    return [jax.numpy.asarray(one) for one in function(*map(np.asarray, arrays))]


def _call_avals(*arrays: Any, function: Callable[..., Any], avals: Any) -> Any:
    return list(avals), {callback._IOEffect}


def _call_batched(args: Any, dims: Any, *, function: Callable[..., Any], avals: Any) -> Any:
    size = next(one.shape[dim] for one, dim in zip(args, dims, strict=True) if dim is not None)
    front = [batching.bdim_at_front(one, dim, size) for one, dim in zip(args, dims, strict=True)]
    results = jax.lax.map(lambda row: call_p.bind(*row, function=function, avals=avals), front)
    return results, (0,) * len(results)


def _call_lowered(ctx: Any, *args: Any, function: Callable[..., Any], avals: Any) -> Any:
    sharding = callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)
    results, _, _ = callback.emit_python_callback(
        ctx,
        lambda *arrays: tuple(function(*map(np.asarray, arrays))),
        None,
        list(args),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=False,
        sharding=sharding,
    )
    return results


batching.primitive_batchers[call_p] = _call_batched
mlir.register_lowering(call_p, _call_lowered)
call_p.def_impl(_call)
call_p.def_effectful_abstract_eval(_call_avals)
