"""Primitives that compute nothing.

`straight` leads derivatives past a routine, `tap` shows cotangents, `tie` waits for a callback.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
from jax._src import core
from jax._src.interpreters import ad, batching, mlir

from ._programs import tapped
from ._traces import argument_of, primal


class Mark(Protocol):
    """The op whose cotangents a tap shows.

    handed: symbols of the program around it, which the next tap of the op gets that a backward pass comes to.
    """

    handed: list[Any]

    def transposed(
        self, side: str, positions: Sequence[int], cotangents: list[Any], handed: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the cotangents that go on instead of these, and what the next tap is handed.

        side: "outputs" where they enter the backward op, "inputs" where they leave it.
        """


class Originals:
    """Which symbol, or array, each one stands for that was made in its place, or that a part has given.

    Of arrays the last few are kept, which ops are about to read: each of them takes memory.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Callable[[], Any]]] = {}
        self._last: deque[Any] = deque(maxlen=16)

    def note(self, made: Any, value: Any) -> Any:
        """Record that a value was made in the place of another; return it."""
        own, other = primal(made), self.of(value)
        if own is not other and all(isinstance(one, (core.Tracer, jax.Array)) for one in (own, other)):
            reference = weakref.ref(own, partial(self._forget, id(own)))
            if isinstance(other, core.Tracer):
                self._known[id(own)] = reference, lambda: other
            else:
                self._last.append(other)
                self._known[id(own)] = reference, weakref.ref(other)
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
        known = self._known.get(id(value))
        found = known[1]() if known is not None and known[0]() is value else None
        return value if found is None else found

    def clear(self) -> None:
        """Drop every array."""
        self._last.clear()

    def _forget(self, key: int, _: Any) -> None:
        self._known.pop(key, None)


ORIGINALS = Originals()
straight_p = core.Primitive("amanda_straight")
tie_p = core.Primitive("amanda_tie")
tap_p = core.Primitive("amanda_tap")
tap_p.multiple_results = True


def straight(original: Any, value: Any) -> Any:
    """Return `value`, whose derivatives are those of `original`."""
    if not isinstance(original, core.Tracer):
        return value if isinstance(value, jax.Array) else jax.numpy.asarray(value)
    return ORIGINALS.note(straight_p.bind(original, value), original)


def tie(value: Any, token: Any) -> Any:
    """Return `value`, for which the callback that gives the token has to be called."""
    return ORIGINALS.note(tie_p.bind(value, token), value) if isinstance(token, core.Tracer) else value


def tap(values: Sequence[Any], mark: Mark, side: str, carried: Sequence[Any] = ()) -> list[Any]:
    """Return the values, whose cotangents are brought to `mark` when a backward pass comes through.

    carried: symbols that the backward pass is given, in whichever program it is traced.
    """
    places = [i for i, value in enumerate(values) if _has_tangent(value)]
    if not places:
        return list(values)
    tapped()
    results = tap_p.bind(
        *carried, *(values[i] for i in places), mark=mark, side=side, positions=tuple(places), mapped=0
    )
    result = list(values)
    for place, value in zip(places, results, strict=True):
        result[place] = ORIGINALS.note(value, values[place])
    return result


def _has_tangent(value: Any) -> bool:
    return isinstance(value, core.Tracer) and jax.numpy.issubdtype(value.dtype, jax.numpy.inexact)


def _straight(original: Any, value: Any) -> Any:
    return value


def _straight_aval(original: Any, value: Any) -> Any:
    return original.update(weak_type=False) if original.dtype == value.dtype else value


def _straight_jvp(primals: Any, tangents: Any) -> Any:
    return straight_p.bind(*primals), tangents[0]


def _straight_batched(args: Any, dims: Any) -> Any:
    size = next(one.shape[dim] for one, dim in zip(args, dims, strict=True) if dim is not None)
    first, second = (batching.bdim_at_front(one, dim, size) for one, dim in zip(args, dims, strict=True))
    return straight_p.bind(first, second), 0


ad.primitive_jvps[straight_p] = _straight_jvp
batching.primitive_batchers[straight_p] = _straight_batched
mlir.register_lowering(straight_p, lambda ctx, original, value: [value])


def _tie_batched(args: Any, dims: Any) -> Any:
    return tie_p.bind(*args), dims[0]


tie_p.def_impl(lambda value, token: value)
tie_p.def_abstract_eval(lambda value, token: value)
ad.primitive_jvps[tie_p] = lambda primals, tangents: (tie_p.bind(*primals), tangents[0])
batching.primitive_batchers[tie_p] = _tie_batched
mlir.register_lowering(tie_p, lambda ctx, value, token: [value])


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
    cotangents: Any, *args: Any, mark: Mark, side: str, positions: Any, mapped: int
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


def _tap_batched(args: Any, dims: Any, *, positions: Any, mapped: int, **params: Any) -> Any:
    size = next(one.shape[dim] for one, dim in zip(args, dims, strict=True) if dim is not None)
    front = [batching.bdim_at_front(one, dim, size) for one, dim in zip(args, dims, strict=True)]
    shown = tap_p.bind(*front, positions=positions, mapped=mapped + 1, **params)
    return shown, (0,) * len(shown)


def _tap_lowered(ctx: Any, *args: Any, positions: Any, **params: Any) -> list[Any]:
    return _split(args, positions)[1]


ad.primitive_jvps[tap_p] = _tap_jvp
ad.primitive_transposes[tap_p] = partial(ad.linear_transpose2, _tap_transposed)
batching.primitive_batchers[tap_p] = _tap_batched
mlir.register_lowering(tap_p, _tap_lowered)
straight_p.def_impl(_straight)
straight_p.def_abstract_eval(_straight_aval)
tap_p.def_impl(_tap)
tap_p.def_abstract_eval(_tap)
