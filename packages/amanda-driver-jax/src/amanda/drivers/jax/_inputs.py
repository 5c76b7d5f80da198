"""Arrays that routines in a program read: inputs of the program, for which they are read at each call."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import jax
from amanda.graph import Reading
from jax._src import core, pjit
from jax._src.interpreters import partial_eval as pe

from ._reads import JaxReads
from ._tensors import Arrays
from ._traces import ARRAYS, is_tensor


class LiftedArrays(Arrays):
    """Symbols for routines in a program, in which arrays that a routine reads are inputs of the program."""

    def __init__(self, reads: JaxReads, lift: Callable[[Reading], Any], held: list[Any]) -> None:
        """reads: what routines read.  lift: gives the symbol of the input that a place is read for.

        held: takes the arrays that routines compute with and that no name in their code leads to.
        """
        self._reads, self._lift, self._held = reads, lift, held

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine on symbols; put what it computes into the program."""
        return super().call_isolated(partial(self._lifted, func), values, kwargs)

    def _lifted(self, func: Callable[..., Any], *values: Any, **kwargs: Any) -> Any:
        places = [one for one in self._reads if isinstance(one.value, ARRAYS)]
        leaves, tree = jax.tree_util.tree_flatten(values, is_leaf=lambda one: one is None)
        at = [i for i, leaf in enumerate(leaves) if is_tensor(leaf)]
        forms: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            own = list(leaves)
            for i, array in zip(at, arrays, strict=True):
                own[i] = array
            result = func(*jax.tree_util.tree_unflatten(tree, own), **kwargs)
            outs, form = jax.tree_util.tree_flatten(result, is_leaf=lambda one: one is None)
            forms.append((outs, form))
            return [one for one in outs if is_tensor(one)]

        closed = jax.make_jaxpr(flat)(*(leaves[i] for i in at))
        consts = [self._const(one, places) for one in closed.consts]
        results = iter(core.eval_jaxpr(closed.jaxpr, consts, *(leaves[i] for i in at)))
        outs, form = forms[0]
        return jax.tree_util.tree_unflatten(form, [next(results) if is_tensor(one) else one for one in outs])

    def _const(self, const: Any, places: Sequence[Reading]) -> Any:
        place = next((one for one in places if _is_of(const, one.value)), None)
        if place is not None:
            return self._lift(place)
        if isinstance(const, jax.Array):
            self._held.append(const)
        return const


def _is_of(const: Any, value: Any) -> bool:
    """Return True if a constant of a program is a value: JAX has its own objects for arrays of NumPy."""
    if const is value or not (isinstance(const, np.ndarray) and isinstance(value, np.ndarray)):
        return const is value
    return const.shape == value.shape and const.ctypes.data == value.ctypes.data


class Program(NamedTuple):
    """A program with inputs that are read at each call.  params: of its jit.  places: of each constant."""

    params: Any
    consts: Sequence[Any]
    places: Sequence[Reading | None]

    def inputs(self) -> list[Any]:
        """Return the constants, with what is read now."""
        pairs = zip(self.consts, self.places, strict=True)
        return [one if place is None else place.read(place.holder, place.name) for one, place in pairs]


def with_inputs(params: Any, inputs: Mapping[int, Reading]) -> Program | None:
    """Return a program whose constants are inputs, if any of them is read at each call; else None.

    params: JAX's for a jitted function.
    """
    consts, closed = list(params.consts), params.params["jaxpr"]
    if any(id(one) in inputs for one in closed.consts):
        closed, more = pe.separate_consts(closed)
        count = len(more)
        own = dict(
            params.params, jaxpr=closed,
            in_shardings=(pjit.UNSPECIFIED,) * count + params.params["in_shardings"],
            in_layouts=(None,) * count + params.params["in_layouts"],
            donated_invars=(False,) * count + params.params["donated_invars"],
        )  # fmt: skip
        consts = [*more, *consts]
        params = params._replace(params=own, consts=consts)
    places = [inputs.get(id(one)) for one in consts]
    return Program(params, consts, places) if any(places) else None
