"""Amanda's primitives in JAX's programs, and the originals of the values that they return.

`straight_through` leads derivatives past a routine, `tap` brings cotangents to routines, and `call_python`
calls Python.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

import jax
from amanda.backend import TensorMap
from jax._src import callback, effects
from jax._src.interpreters import ad, batching
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import mlir

from ._traces import INSERTION, TAP, add_note, outermost_value, primal

if TYPE_CHECKING:
    from ._autodiff import TappedExecution


class Originals:
    """The original of each array or symbol that the driver puts in place of another, as by a tap.

    Only the last few arrays are kept alive, since each takes memory; the next ops read these.
    """

    def __init__(self) -> None:
        # Each original by a function that returns it, or None once it has gone.
        self._original_of: TensorMap[Callable[[], Any]] = TensorMap()
        self._last_arrays: deque[Any] = deque(maxlen=16)

    def record(self, substitute: Any, value: Any) -> Any:
        """Record what a substitute stands for, if both are arrays or symbols; return the substitute."""
        array, original = primal(substitute), self.of(value)
        if array is not original and isinstance(array, jax.Array) and isinstance(original, jax.Array):
            # Nothing else may hold an original symbol; arrays are held weakly, since each takes memory.
            if isinstance(original, jax.core.Tracer):
                self._original_of[array] = lambda: original
            else:
                self._last_arrays.append(original)
                self._original_of[array] = weakref.ref(original)
        return substitute

    def record_all(self, substitutes: Any, values: Sequence[Any]) -> None:
        """Record what the leaves of a pytree stand for; nothing if there are not as many values."""
        leaves = jax.tree_util.tree_leaves(substitutes)
        if len(leaves) == len(values):
            for leaf, value in zip(leaves, values, strict=True):
                self.record(leaf, value)

    def of(self, value: Any) -> Any:
        """Return the original of a value in the outermost function; the value itself if it has none."""
        value = outermost_value(value)
        reference = self._original_of.get(value)
        original = None if reference is None else reference()
        return value if original is None else original

    def clear(self) -> None:
        """Release the arrays that are kept alive."""
        self._last_arrays.clear()


class Callbacks(effects.Effect):  # type: ignore[misc]
    """Effect of ordered calls of Python: JAX passes a token from each call to the next.

    A new type, because JAX refuses the effect of `jax.io_callback` in loops and branches under vmap.
    """


CALLBACKS = Callbacks()
for allowing in (
    effects.lowerable_effects, effects.ordered_effects, effects.shardable_ordered_effects,
    effects.control_flow_allowed_effects, effects.remat_allowed_effects,
    effects.custom_derivatives_allowed_effects, effects.partial_eval_kept_effects,
):  # fmt: skip
    # JAX refuses an effect in loops, checkpoints and derivatives unless its type is allowed there.
    allowing.add_type(Callbacks)

FAILURES: list[BaseException] = []
"""Exceptions of Python functions that programs have called; the first is raised in the user's call."""


def raise_failure() -> None:
    """Raise the first exception in FAILURES, if there is one; forget all of them."""
    error = next(iter(FAILURES), None)
    FAILURES.clear()
    if error is not None:
        raise error


_SHARDING_GROUPS = count(1 << 32)
"""Numbers of groups of values that are sharded alike, apart from the numbers that JAX gives."""
ORIGINALS = Originals()
straight_p = Primitive("amanda_straight")
tap_p = Primitive("amanda_tap")
call_p = Primitive("amanda_call")
tap_p.multiple_results = call_p.multiple_results = True


def straight_through(original: Any, value: Any) -> Any:
    """Return `value` with the derivatives of `original`, as an array; note that a routine gave a value."""
    add_note(INSERTION)
    if not isinstance(original, jax.core.Tracer):  # nothing is differentiated or staged here
        return value if isinstance(value, jax.Array) else jax.numpy.asarray(value)
    return ORIGINALS.record(straight_p.bind(original, value), original)


def tap(
    values: Sequence[Any], execution: "TappedExecution", side: str, carried_symbols: Sequence[Any] = ()
) -> list[Any]:
    """Return the values behind a tap: a backward pass through it calls `execution.observe_cotangents`.

    Only symbols of types that have derivatives are tapped, which is noted, and the values are recorded as
    their originals; the other values are returned as they are.
    side: of the op, "inputs" or "outputs"; or "run", where the tap hands the carried symbols to the
    execution, in whichever program the backward pass is traced.
    """
    positions = tuple(i for i, value in enumerate(values) if _has_tangent(value))
    result = list(values)
    if positions:
        add_note(TAP)
        tapped_values = tap_p.bind(
            *carried_symbols, *(values[i] for i in positions), execution=execution, side=side,
            positions=positions, mapped_count=0,
        )  # fmt: skip
        for position, tapped_value in zip(positions, tapped_values, strict=True):
            result[position] = ORIGINALS.record(tapped_value, values[position])
    return result


def call_python(function: Callable[..., Any], results_like: Sequence[Any], *arrays: Any) -> list[Any]:
    """Call a function at each execution of the program; return symbols of its results.

    These have the shapes and dtypes of `results_like`. The function gets arrays of NumPy. `jax.io_callback`
    would put arrays on a device first, which needs a thread of JAX's pool, and a running program may hold
    them all.
    """
    avals = tuple(
        jax.core.ShapedArray(item.shape, jax.dtypes.canonicalize_dtype(item.dtype)) for item in results_like
    )
    return list(call_p.bind(*arrays, function=function, avals=avals, mapped_axes=()))


def _has_tangent(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer) and jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def with_mapped_axis_first(args: Any, dims: Any) -> list[Any]:
    """Return arguments with the mapped axis first; arguments without one are repeated along it."""
    size = next(value.shape[dim] for value, dim in zip(args, dims, strict=True) if dim is not None)
    return [batching.bdim_at_front(value, dim, size) for value, dim in zip(args, dims, strict=True)]


def _straight_aval(original: Any, value: Any) -> Any:
    # Weak types decide promotion in ops that follow: those of the program, not of the value, whose type is
    # never weak where Python computed it.
    return value if original.dtype != value.dtype else original


def _straight_batched(args: Any, dims: Any) -> Any:
    return straight_p.bind(*with_mapped_axis_first(args, dims)), 0


def _straight_lowered(ctx: Any, original: Any, value: Any) -> Any:
    """Lower `straight_through`: shard the value, which a callback puts on one device, like the original."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.ShardingContext) and context.num_devices > 1:
        value = stablehlo.optimization_barrier([value])  # the callback itself stays on its device
        if jax.config.jax_use_shardy_partitioner:  # without it XLA chooses the sharding
            group = next(_SHARDING_GROUPS)
            sdy.sharding_group(original, group)
            sdy.sharding_group(value, group)
    return [value]


straight_p.def_impl(lambda original, value: value)
straight_p.def_abstract_eval(_straight_aval)
# The tangent of the original alone: derivatives pass the routine's value by.
ad.primitive_jvps[straight_p] = lambda primals, tangents: (straight_p.bind(*primals), tangents[0])
batching.primitive_batchers[straight_p] = _straight_batched
mlir.register_lowering(straight_p, _straight_lowered)


def _split_tap(args: Sequence[Any], positions: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Return the carried symbols of a tap, and its values."""
    carried_count = len(args) - len(positions)
    return list(args[:carried_count]), list(args[carried_count:])


def _tap_results(*args: Any, positions: Any, **params: Any) -> list[Any]:
    _, values = _split_tap(args, positions)
    return values


def _tap_jvp(primals: Any, tangents: Any, *, positions: Any, **params: Any) -> Any:
    """Differentiate a tap: the tangents that are not zero are tapped, so that their transpose is reached."""
    carried_symbols, values = _split_tap(primals, positions)
    _, value_tangents = _split_tap(tangents, positions)
    nonzero = [i for i, tangent in enumerate(value_tangents) if type(tangent) is not ad.Zero]
    if nonzero:
        tapped_tangents = tap_p.bind(
            *carried_symbols, *(value_tangents[i] for i in nonzero),
            positions=tuple(positions[i] for i in nonzero), **params,
        )  # fmt: skip
        for i, tangent in zip(nonzero, tapped_tangents, strict=True):
            value_tangents[i] = tangent
    return values, value_tangents


def _tap_transposed(
    cotangents: Any, *args: Any, execution: "TappedExecution", side: str, positions: Any, mapped_count: int
) -> list[Any]:
    """Transpose a tap: pass cotangents to the execution's routines; a tap of `run` hands over its symbols."""
    carried_symbols, _ = _split_tap(args, positions)
    # The transpose has a cotangent for each argument: None for carried symbols, which have none.
    unchanged = [*(None for _ in carried_symbols), *cotangents]
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):  # no gradient came this way
        return unchanged
    if carried_symbols:
        execution.carried_symbols = carried_symbols
        return unchanged
    observe: Any = partial(execution.observe_cotangents, side, positions)
    # The cotangents have the mapped axes that the tap's values had: routines see one row's shape.
    for _ in range(mapped_count):
        observe = jax.vmap(observe)
    results, execution.carried_symbols = observe(
        [ad.instantiate_zeros(cotangent) for cotangent in cotangents], execution.carried_symbols
    )
    return list(results)


def _tap_batched(args: Any, dims: Any, *, mapped_count: int, **params: Any) -> Any:
    args = with_mapped_axis_first(args, dims)
    tapped_values = tap_p.bind(*args, mapped_count=mapped_count + 1, **params)
    return tapped_values, (0,) * len(tapped_values)


tap_p.def_impl(_tap_results)
tap_p.def_abstract_eval(_tap_results)
ad.primitive_jvps[tap_p] = _tap_jvp
ad.primitive_transposes[tap_p] = partial(ad.linear_transpose2, _tap_transposed)
batching.primitive_batchers[tap_p] = _tap_batched
mlir.register_lowering(tap_p, lambda ctx, *args, positions, **params: _split_tap(args, positions)[1])


def _call_batched(args: Any, dims: Any, *, avals: Any, mapped_axes: Any, **params: Any) -> Any:
    """Map a call over an axis: one call gets all rows, and calls the function for each row."""
    row_count = next(value.shape[dim] for value, dim in zip(args, dims, strict=True) if dim is not None)
    operands = [
        value if dim is None else batching.moveaxis(value, dim, 0)
        for value, dim in zip(args, dims, strict=True)
    ]
    have_axis = tuple(dim is not None for dim in dims)
    results = call_p.bind(
        *operands,
        avals=tuple(aval.update(shape=(row_count, *aval.shape)) for aval in avals),
        mapped_axes=(have_axis, *mapped_axes),
        **params,
    )
    return results, (0,) * len(results)


def _call_by_row(function: Callable[..., Any], avals: Sequence[Any], mapped_axes: Sequence[Any]) -> Any:
    """Return a function of NumPy's arrays with mapped first axes, which calls `function` for each row.

    avals: of the results.  mapped_axes: for each mapped axis, from the first on, which arrays have the axis.
    """
    if not mapped_axes:
        return function
    have_axis, *inner_axes = mapped_axes
    row_avals = [aval.update(shape=aval.shape[1:]) for aval in avals]
    call_on_row = _call_by_row(function, row_avals, inner_axes)

    def call_on_rows(*arrays: Any) -> list[Any]:
        """Call the function on each row of the arrays that have the axis; stack its results."""
        results = [np.empty(aval.shape, aval.dtype) for aval in avals]
        row_count = next(len(array) for array, has_axis in zip(arrays, have_axis, strict=True) if has_axis)
        for i in range(row_count):
            row = [
                array[i, ...] if has_axis else array
                for array, has_axis in zip(arrays, have_axis, strict=True)
            ]
            for result, row_result in zip(results, call_on_row(*row), strict=True):
                result[i] = row_result
        return results

    return call_on_rows


def _call_lowered(ctx: Any, *args: Any, function: Callable[..., Any], avals: Any, mapped_axes: Any) -> Any:
    """Lower a call of Python to a callback of XLA, ordered among other callbacks by a token."""
    call = _call_by_row(function, avals, mapped_axes)
    results, token, _ = mlir.emit_python_callback(
        ctx, lambda *arrays: tuple(call(*map(np.asarray, arrays))), ctx.tokens_in.get(CALLBACKS), list(args),
        ctx.avals_in, ctx.avals_out, has_side_effect=True, returns_token=True,
        sharding=callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out),
    )  # fmt: skip
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({CALLBACKS: token})))
    return results


def _call_now(*arrays: Any, function: Callable[..., Any], avals: Any, mapped_axes: Any) -> list[Any]:
    results = _call_by_row(function, avals, mapped_axes)(*map(np.asarray, arrays))
    raise_failure()
    return [jax.numpy.asarray(result) for result in results]


call_p.def_impl(_call_now)
call_p.def_effectful_abstract_eval(lambda *args, avals, **params: (list(avals), {CALLBACKS}))
batching.primitive_batchers[call_p] = _call_batched
# Not cacheable: each call has a callback of its own, and its token orders it among the others.
mlir.register_lowering(call_p, _call_lowered, cacheable=False)
