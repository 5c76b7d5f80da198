"""Primitives of Amanda in JAX's programs.

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

from ._traces import INSERTION, TAP, add_note, argument_of, primal

if TYPE_CHECKING:
    from ._autodiff import TappedExecution


class Originals:
    """The originals of values that the driver has made: tapped symbols, or results of parts of programs.

    Only the last few arrays are kept alive, since each takes memory; the next ops read these.
    """

    def __init__(self) -> None:
        self._original_of: TensorMap[Callable[[], Any]] = TensorMap()
        self._last: deque[Any] = deque(maxlen=16)

    def record(self, result: Any, value: Any) -> Any:
        """Record the original of a result; return the result."""
        result_value, original = primal(result), self.of(value)
        if (
            result_value is not original
            and isinstance(result_value, jax.Array)
            and isinstance(original, jax.Array)
        ):
            # Nothing else may hold an original symbol; arrays are held weakly, since each takes memory.
            if isinstance(original, jax.core.Tracer):
                self._original_of[result_value] = lambda: original
            else:
                self._last.append(original)
                self._original_of[result_value] = weakref.ref(original)
        return result

    def record_all(self, result: Any, values: Sequence[Any]) -> None:
        """Record the originals of the leaves of a result."""
        leaves = jax.tree_util.tree_leaves(result)
        if len(leaves) == len(values):
            for leaf, value in zip(leaves, values, strict=True):
                self.record(leaf, value)

    def of(self, value: Any) -> Any:
        """Return the original of a value in the outermost function; the value itself if it has none."""
        value = argument_of(value)
        reference = self._original_of.get(value)
        original = None if reference is None else reference()
        return value if original is None else original

    def clear(self) -> None:
        """Drop every array."""
        self._last.clear()


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
"""Exceptions of functions that programs have called; the first is raised in the user's call."""


def raise_failure() -> None:
    """Raise the first exception of the called functions, if there is one."""
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
    """Return `value` with the derivatives of `original`."""
    add_note(INSERTION)
    if not isinstance(original, jax.core.Tracer):  # nothing is differentiated or staged here
        return value if isinstance(value, jax.Array) else jax.numpy.asarray(value)
    return ORIGINALS.record(straight_p.bind(original, value), original)


def tap(values: Sequence[Any], mark: "TappedExecution", side: str, carried: Sequence[Any] = ()) -> list[Any]:
    """Return the values with taps, which pass cotangents to `mark` when a backward pass comes through.

    carried: symbols that the backward pass gets, in whichever program it is traced.
    """
    places = tuple(i for i, value in enumerate(values) if _has_tangent(value))
    result = list(values)
    if places:
        add_note(TAP)
        tapped = [values[i] for i in places]
        results = tap_p.bind(*carried, *tapped, mark=mark, side=side, positions=places, mapped=0)
        for place, value in zip(places, results, strict=True):
            result[place] = ORIGINALS.record(value, values[place])
    return result


def call_python(function: Callable[..., Any], results: Sequence[Any], *arrays: Any) -> list[Any]:
    """Call a function at each execution of the program, and return its results, like `results`.

    The function gets arrays of NumPy. `jax.io_callback` would put arrays on a device first, which needs a
    thread of JAX's pool, and a running program may hold them all.
    """
    avals = tuple(
        jax.core.ShapedArray(result.shape, jax.dtypes.canonicalize_dtype(result.dtype)) for result in results
    )
    return list(call_p.bind(*arrays, function=function, avals=avals, mapped=()))


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
    count = len(args) - len(positions)
    return list(args[:count]), list(args[count:])


def _tap_results(*args: Any, positions: Any, **params: Any) -> list[Any]:
    return _split_tap(args, positions)[1]


def _tap_jvp(primals: Any, tangents: Any, *, positions: Any, **params: Any) -> Any:
    """Differentiate a tap: the tangents that are not zero are tapped, so that their transpose is reached."""
    (carried, values), (_, results) = _split_tap(primals, positions), _split_tap(tangents, positions)
    present = [i for i, tangent in enumerate(results) if type(tangent) is not ad.Zero]
    if present:
        places = tuple(positions[i] for i in present)
        tapped = tap_p.bind(*carried, *(results[i] for i in present), positions=places, **params)
        for i, tangent in zip(present, tapped, strict=True):
            results[i] = tangent
    return values, results


def _tap_transposed(
    cotangents: Any, *args: Any, mark: "TappedExecution", side: str, positions: Any, mapped: int
) -> list[Any]:
    """Transpose a tap: pass cotangents to the execution's routines, once per mapped axis under vmap."""
    carried, _ = _split_tap(args, positions)
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):  # no gradient came this way
        return [*(None for _ in carried), *cotangents]
    if carried:
        mark.carried_symbols = carried
        return [*(None for _ in carried), *cotangents]
    run: Callable[..., tuple[list[Any], list[Any]]] = partial(mark.observe_cotangents, side, positions)
    # The cotangents have the mapped axes that the tap's values had: routines see one row's shape.
    for _ in range(mapped):
        run = jax.vmap(run)
    results, mark.carried_symbols = run(
        [ad.instantiate_zeros(cotangent) for cotangent in cotangents], mark.carried_symbols
    )
    return list(results)


def _tap_batched(args: Any, dims: Any, *, mapped: int, **params: Any) -> Any:
    tapped = tap_p.bind(*with_mapped_axis_first(args, dims), mapped=mapped + 1, **params)
    return tapped, (0,) * len(tapped)


tap_p.def_impl(_tap_results)
tap_p.def_abstract_eval(_tap_results)
ad.primitive_jvps[tap_p] = _tap_jvp
ad.primitive_transposes[tap_p] = partial(ad.linear_transpose2, _tap_transposed)
batching.primitive_batchers[tap_p] = _tap_batched
mlir.register_lowering(tap_p, lambda ctx, *args, positions, **params: _split_tap(args, positions)[1])


def _call_batched(args: Any, dims: Any, *, avals: Any, mapped: Any, **params: Any) -> Any:
    """Map a call over an axis: one call gets all rows, and calls the function for each row."""
    rows = tuple(dim is not None for dim in dims)
    size = next(value.shape[dim] for value, dim in zip(args, dims, strict=True) if dim is not None)
    operands = [
        value if dim is None else batching.moveaxis(value, dim, 0)
        for value, dim in zip(args, dims, strict=True)
    ]
    results = call_p.bind(
        *operands,
        avals=tuple(value.update(shape=(size, *value.shape)) for value in avals),
        mapped=(rows, *mapped),
        **params,
    )
    return results, (0,) * len(results)


def _by_row(function: Callable[..., Any], avals: Sequence[Any], mapped: Sequence[Sequence[bool]]) -> Any:
    """Return a function of arrays of NumPy with mapped first axes, which calls `function` for each row.

    avals: of the results.  mapped: for each mapped axis, from the first on, which arrays have the axis.
    """
    if not mapped:
        return function
    inner = _by_row(function, [aval.update(shape=aval.shape[1:]) for aval in avals], mapped[1:])

    def call(*arrays: Any) -> list[Any]:
        results = [np.empty(array.shape, array.dtype) for array in avals]
        size = next(len(array) for array, has_row in zip(arrays, mapped[0], strict=True) if has_row)
        for i in range(size):
            row = [
                array[i, ...] if has_row else array for array, has_row in zip(arrays, mapped[0], strict=True)
            ]
            for result, value in zip(results, inner(*row), strict=True):
                result[i] = value
        return results

    return call


def _call_lowered(ctx: Any, *args: Any, function: Callable[..., Any], avals: Any, mapped: Any) -> Any:
    """Lower a call of Python to a callback of XLA, ordered among other callbacks by a token."""
    call = _by_row(function, avals, mapped)
    results, token, _ = mlir.emit_python_callback(
        ctx, lambda *arrays: tuple(call(*map(np.asarray, arrays))), ctx.tokens_in.get(CALLBACKS), list(args),
        ctx.avals_in, ctx.avals_out, has_side_effect=True, returns_token=True,
        sharding=callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out),
    )  # fmt: skip
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({CALLBACKS: token})))
    return results


def _call_now(*arrays: Any, function: Callable[..., Any], avals: Any, mapped: Any) -> list[Any]:
    results = _by_row(function, avals, mapped)(*map(np.asarray, arrays))
    raise_failure()
    return [jax.numpy.asarray(result) for result in results]


call_p.def_impl(_call_now)
call_p.def_effectful_abstract_eval(lambda *args, avals, **params: (list(avals), {CALLBACKS}))
batching.primitive_batchers[call_p] = _call_batched
# Not cacheable: each call has a callback of its own, and its token orders it among the others.
mlir.register_lowering(call_p, _call_lowered, cacheable=False)
