"""Primitives of Amanda's.

`straight` leads derivatives past a routine, `tap` shows cotangents, `call` calls Python.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import jax
from amanda.backend import TensorMap
from jax._src import callback, core, dtypes, effects, shard_alike, sharding_impls
from jax._src.interpreters import ad, batching, mlir
from jax._src.lib.mlir.dialects import hlo

from ._traces import INSERTION, TAP, argument_of, note, primal

if TYPE_CHECKING:
    from ._autodiff import Made


class Originals:
    """Which symbol, or array, each one stands for that was made in its place, or that a part has given.

    Of arrays the last few are kept, which ops are about to read: each of them takes memory.
    """

    def __init__(self) -> None:
        self._known: TensorMap[Callable[[], Any]] = TensorMap()
        self._last: deque[Any] = deque(maxlen=16)

    def note(self, made: Any, value: Any) -> Any:
        """Record that a value was made in the place of another; return it."""
        own, other = primal(made), self.of(value)
        if own is not other and isinstance(own, jax.Array) and isinstance(other, jax.Array):
            if isinstance(other, core.Tracer):
                self._known[own] = lambda: other
            else:
                self._last.append(other)
                self._known[own] = weakref.ref(other)
        return made

    def note_all(self, made: Any, values: Sequence[Any]) -> None:
        """Record that the leaves of a result were made in the place of others."""
        leaves = jax.tree_util.tree_leaves(made)
        if len(leaves) == len(values):
            for one, value in zip(leaves, values, strict=True):
                self.note(one, value)

    def of(self, value: Any) -> Any:
        """Return what a value stands for in the outermost function: itself where it stands for no other."""
        value = argument_of(value)
        known = self._known.get(value)
        found = None if known is None else known()
        return value if found is None else found

    def clear(self) -> None:
        """Drop every array."""
        self._last.clear()


class Callbacks(effects.Effect):  # type: ignore[misc]
    """Effect of calls of Python in the order of the program: JAX hands a token from each to the next.

    A type of Amanda's: JAX refuses its own, of `jax.io_callback`, in loops and branches that are mapped over.
    """


CALLBACKS = Callbacks()
for allowing in (
    effects.lowerable_effects, effects.ordered_effects, effects.shardable_ordered_effects,
    effects.control_flow_allowed_effects, effects.remat_allowed_effects,
    effects.custom_derivatives_allowed_effects, effects.partial_eval_kept_effects,
):  # fmt: skip
    allowing.add_type(Callbacks)

FAILURES: list[BaseException] = []
"""Exceptions of functions that programs have called, until the first is raised in the user's call."""


def raise_failure() -> None:
    """Raise the first exception of a function that was called, if there is any."""
    error = next(iter(FAILURES), None)
    FAILURES.clear()
    if error is not None:
        raise error


ORIGINALS = Originals()
straight_p = core.Primitive("amanda_straight")
tap_p = core.Primitive("amanda_tap")
call_p = core.Primitive("amanda_call")
tap_p.multiple_results = call_p.multiple_results = True


def straight(original: Any, value: Any) -> Any:
    """Return `value`, whose derivatives are those of `original`."""
    note(INSERTION)
    if not isinstance(original, core.Tracer):
        return value if isinstance(value, jax.Array) else jax.numpy.asarray(value)
    return ORIGINALS.note(straight_p.bind(original, value), original)


def tap(values: Sequence[Any], mark: "Made", side: str, carried: Sequence[Any] = ()) -> list[Any]:
    """Return the values, whose cotangents are brought to `mark` when a backward pass comes through.

    carried: symbols that the backward pass is given, in whichever program it is traced.
    """
    places = tuple(i for i, value in enumerate(values) if _has_tangent(value))
    result = list(values)
    if places:
        note(TAP)
        shown = [values[i] for i in places]
        results = tap_p.bind(*carried, *shown, mark=mark, side=side, positions=places, mapped=0)
        for place, value in zip(places, results, strict=True):
            result[place] = ORIGINALS.note(value, values[place])
    return result


def call(function: Callable[..., Any], results: Sequence[Any], *arrays: Any) -> list[Any]:
    """Return what a function gives, of these shapes and dtypes, at each execution of the program.

    It is called with arrays of NumPy, of which JAX's runtime knows nothing: `jax.io_callback` puts what it
    gives on a device first, for which no thread may be left while a program runs.
    """
    avals = tuple(core.ShapedArray(one.shape, dtypes.canonicalize_dtype(one.dtype)) for one in results)
    return list(call_p.bind(*arrays, function=function, avals=avals, mapped=()))


def _has_tangent(value: Any) -> bool:
    return isinstance(value, core.Tracer) and jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def front(args: Any, dims: Any) -> list[Any]:
    """Return arguments of which the first axis of each is mapped over."""
    size = next(one.shape[dim] for one, dim in zip(args, dims, strict=True) if dim is not None)
    return [batching.bdim_at_front(one, dim, size) for one, dim in zip(args, dims, strict=True)]


def _straight_aval(original: Any, value: Any) -> Any:
    if original.dtype != value.dtype:
        return value
    return original.update(weak_type=original.weak_type and value.weak_type)


def _straight_batched(args: Any, dims: Any) -> Any:
    return straight_p.bind(*front(args, dims)), 0


def _straight_lowered(ctx: Any, original: Any, value: Any) -> Any:
    """Place what a callback gives on one device as what it was given is placed on several."""
    context = ctx.module_context.axis_context
    if isinstance(context, sharding_impls.ShardingContext) and context.num_devices > 1:
        value = hlo.optimization_barrier([value])  # the callback itself stays on its device
        _, value = shard_alike._group_shard(ctx, original, value, ctx.avals_in[0], ctx.avals_out[0])
    return [value]


straight_p.def_impl(lambda original, value: value)
straight_p.def_abstract_eval(_straight_aval)
ad.primitive_jvps[straight_p] = lambda primals, tangents: (straight_p.bind(*primals), tangents[0])
batching.primitive_batchers[straight_p] = _straight_batched
mlir.register_lowering(straight_p, _straight_lowered)


def _split(args: Sequence[Any], positions: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Return what a tap carries, and the values that it shows."""
    count = len(args) - len(positions)
    return list(args[:count]), list(args[count:])


def _tap(*args: Any, positions: Any, **params: Any) -> list[Any]:
    return _split(args, positions)[1]


def _tap_jvp(primals: Any, tangents: Any, *, positions: Any, **params: Any) -> Any:
    (carried, values), (_, results) = _split(primals, positions), _split(tangents, positions)
    wanted = [i for i, one in enumerate(results) if type(one) is not ad.Zero]
    if wanted:
        places = tuple(positions[i] for i in wanted)
        shown = tap_p.bind(*carried, *(results[i] for i in wanted), positions=places, **params)
        for i, one in zip(wanted, shown, strict=True):
            results[i] = one
    return values, results


def _tap_transposed(
    cotangents: Any, *args: Any, mark: "Made", side: str, positions: Any, mapped: int
) -> list[Any]:
    carried, _ = _split(args, positions)
    if all(type(one) is ad.Zero for one in cotangents):
        return [*(None for _ in carried), *cotangents]
    if carried:
        mark.handed = carried
        return [*(None for _ in carried), *cotangents]
    run: Callable[..., tuple[list[Any], list[Any]]] = partial(mark.transposed, side, positions)
    for _ in range(mapped):
        run = jax.vmap(run)
    results, mark.handed = run([ad.instantiate_zeros(one) for one in cotangents], mark.handed)
    return list(results)


def _tap_batched(args: Any, dims: Any, *, mapped: int, **params: Any) -> Any:
    shown = tap_p.bind(*front(args, dims), mapped=mapped + 1, **params)
    return shown, (0,) * len(shown)


tap_p.def_impl(_tap)
tap_p.def_abstract_eval(_tap)
ad.primitive_jvps[tap_p] = _tap_jvp
ad.primitive_transposes[tap_p] = partial(ad.linear_transpose2, _tap_transposed)
batching.primitive_batchers[tap_p] = _tap_batched
mlir.register_lowering(tap_p, lambda ctx, *args, positions, **params: _split(args, positions)[1])


def _call_batched(args: Any, dims: Any, *, avals: Any, mapped: Any, **params: Any) -> Any:
    rows = tuple(dim is not None for dim in dims)
    size = next(one.shape[dim] for one, dim in zip(args, dims, strict=True) if dim is not None)
    shown = [
        one if dim is None else batching.moveaxis(one, dim, 0) for one, dim in zip(args, dims, strict=True)
    ]
    results = call_p.bind(
        *shown,
        avals=tuple(one.update(shape=(size, *one.shape)) for one in avals),
        mapped=(rows, *mapped),
        **params,
    )
    return results, (0,) * len(results)


def _by_row(function: Callable[..., Any], avals: Sequence[Any], mapped: Sequence[Sequence[bool]]) -> Any:
    """Return a function of arrays of NumPy with mapped first axes, which calls `function` for each row.

    avals: of its results.  mapped: for each axis, from the first on, which arrays have it.
    """
    if not mapped:
        return function
    inner = _by_row(function, [one.update(shape=one.shape[1:]) for one in avals], mapped[1:])

    def call(*arrays: Any) -> list[Any]:
        results = [np.empty(one.shape, one.dtype) for one in avals]
        size = next(len(one) for one, has_row in zip(arrays, mapped[0], strict=True) if has_row)
        for i in range(size):
            row = [one[i, ...] if has_row else one for one, has_row in zip(arrays, mapped[0], strict=True)]
            for result, value in zip(results, inner(*row), strict=True):
                result[i] = value
        return results

    return call


def _call_lowered(ctx: Any, *args: Any, function: Callable[..., Any], avals: Any, mapped: Any) -> Any:
    call = _by_row(function, avals, mapped)
    results, token, _ = callback.emit_python_callback(
        ctx, lambda *arrays: tuple(call(*map(np.asarray, arrays))), ctx.tokens_in.get(CALLBACKS), list(args),
        ctx.avals_in, ctx.avals_out, has_side_effect=True, returns_token=True,
        sharding=callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out),
    )  # fmt: skip
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({CALLBACKS: token})))
    return results


def _call(*arrays: Any, function: Callable[..., Any], avals: Any, mapped: Any) -> list[Any]:
    results = _by_row(function, avals, mapped)(*map(np.asarray, arrays))
    raise_failure()
    return [jax.numpy.asarray(one) for one in results]


call_p.def_impl(_call)
call_p.def_effectful_abstract_eval(lambda *args, avals, **params: (list(avals), {CALLBACKS}))
batching.primitive_batchers[call_p] = _call_batched
mlir.register_lowering(call_p, _call_lowered, cacheable=False)
