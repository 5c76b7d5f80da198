"""Values that traceable routines read beside their arguments: inputs of the program, or guards on it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Action, OpFacts, Reads, State
from amanda.graph import History
from amanda.graph.reads import Reading
from jax._src import core, pjit, source_info_util
from jax._src.interpreters import partial_eval as pe

from ._tensors import Arrays
from ._traces import ARRAYS, is_tensor, is_within_jit

_CONSTANT = (FunctionType, ModuleType, type)


class JaxReads(Reads):
    """Values that routines read; those of arrays that are inputs of a program may be others of that type."""

    opaque: ClassVar[frozenset[str]] = frozenset({"amanda", "numpy", "jax", "jaxlib", "autoray"})

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[tuple[int, Any], Reading] = {}
        self._copies: dict[tuple[int, Any], np.ndarray[Any, Any]] = {}

    def follow(self, action: Action) -> None:
        """Take up what an action's routine reads, and what is in arrays of NumPy, which may be written."""
        super().follow(action)
        for place in self:
            if isinstance(place.value, np.ndarray) and place.key not in self._copies:
                self._copies[place.key] = place.value.copy()

    def hold(self) -> bool:
        """Return True if a program that was traced for these values computes with those of now."""
        with interceptor.Suspension():
            return all(self._is_as_before(place) for place in self)

    def _is_as_before(self, place: Reading) -> bool:
        now = place.read(place.holder, place.name)
        if place.key in self.inputs:
            return isinstance(now, ARRAYS) and core.typeof(now) == core.typeof(place.value)
        if place.key in self._copies:
            copy = self._copies[place.key]
            return isinstance(now, np.ndarray) and now.dtype == copy.dtype and np.array_equal(now, copy)
        return now is place.value or self.is_same(now, place.value)

    @property
    def guards(self) -> bool:
        """Whether a call of the program has to look at what was read."""
        return any(not (isinstance(one.value, _CONSTANT) or callable(one.value)) for one in self)


class Variant:
    """The programs of one function while values that routines read are as they were."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reads = JaxReads()
        self.inputs: dict[int, Reading] = {}
        self.traced: list[tuple[Action, list[Any]]] = []
        self.trace: Any = None
        self._made: list[Any] = []  # their ids stay
        self._reports: dict[tuple[str, str], None] = {}

    @contextmanager
    def tracing(self, action: Action) -> Iterator["LiftedArrays"]:
        """Context in which a routine becomes a part of the program, without what it sets of its tool."""
        with self.reads.tracing([action]):
            held: list[Any] = []
            yield LiftedArrays(self, held)
        self.traced.append((action, held))

    def report(self, what: str, reason: str) -> None:
        """Note what the program does otherwise than its routines say, to be told at each call."""
        self._reports[what, reason] = None

    def reports(self) -> list[tuple[str, str]]:
        """Return what there is to be told."""
        return [*self._reports, *self.reads.unfollowed(self.traced, "a program")]

    def lifted(self, place: Reading) -> Any:
        """Return the symbol of the program's input that a place is read for."""
        with core.set_current_trace(core.eval_trace):
            own = jax.numpy.array(place.value)
        self._made.append(own)
        self.inputs[id(own)] = place
        self.reads.inputs[place.key] = place
        return self.trace.new_const(own, source_info_util.current())


class Variants:
    """The programs of one function for the tools of a layer: one variant for each set of values."""

    def __init__(self) -> None:
        self._history = History(JaxReads)
        self._all: list[Variant] = []

    @contextmanager
    def current(self) -> Iterator[Variant]:
        """Context in which a function is called or traced, for the values of now."""
        variant = next((one for one in self._all if one.reads.hold()), None)
        if variant is None:
            variant = Variant(len(self._all))
            self._all.append(variant)
        before, _thread.at = _thread.at, (self._history, variant)
        try:
            yield variant
        finally:
            _thread.at = before
            self._history.take(variant.reads)


class _Thread(threading.local):
    """at: the history and the variant of the outermost function that is traced."""

    def __init__(self) -> None:
        self.at: tuple[History, Variant] | None = None


_thread = _Thread()


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that a variant is traced of."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _thread.at is not None:
            _thread.at[1].trace = core.trace_ctx.trace
        return function(*args, **kwargs)

    return call


def followed(action: Action) -> Variant | None:
    """Note what a traceable routine in the program reads; None where it has to run at each execution."""
    if _thread.at is None or reads_of(action).written:
        return None
    history, variant = _thread.at
    changing = history.restless(action)
    if changing:
        why = f"what it reads changes often: {changing}, so it runs as Python"
        variant.report(f"traceable {action}", why)
        return None
    return variant


def guard(action: Action, facts: OpFacts) -> None:
    """Trace the program anew for other values that a routine reads which is a part of it in any case.

    Report where other values would not be seen.
    """
    reads = reads_of(action)
    if not is_within_jit() or not (reads.guards or reads.written):
        return
    changing = "" if _thread.at is None else _thread.at[0].restless(action)
    if reads.written:
        why = f"it sets {', '.join(reads.written)}, as the function is traced"
    elif changing:
        why = f"what it reads changes often: {changing}"
    elif _thread.at is None:
        why = "what it reads is not followed where a backward pass runs outside of jit"
    else:
        _thread.at[1].reads.follow(action)
        return
    told = f"{action} of {facts.name}", f"{why}; it stays as it was when the function was traced"
    if _thread.at is None:
        State.current().report(*told, facts.source)
    else:
        _thread.at[1].report(*told)


def reads_of(action: Action) -> JaxReads:
    """Return what a routine reads now, and what it sets beyond itself."""
    reads = JaxReads()
    reads.follow(action)
    reads.settle(())
    return reads


def is_pure(action: Action) -> bool:
    """Return True if a routine reads its arguments alone, and sets nothing."""
    reads = reads_of(action)
    return not reads.guards and not reads.written


class LiftedArrays(Arrays):
    """Symbols for routines in a program, in which arrays that a routine reads are inputs of the program."""

    def __init__(self, variant: Variant, held: list[Any]) -> None:
        """held: takes the arrays that routines compute with and that no name in their code leads to."""
        self._variant = variant
        self._held = held

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine on symbols; put what it computes into the program."""
        return super().call_isolated(partial(self._lifted, func), values, kwargs)

    def _lifted(self, func: Callable[..., Any], *values: Any, **kwargs: Any) -> Any:
        places = [one for one in self._variant.reads if isinstance(one.value, ARRAYS)]
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
            return self._variant.lifted(place)
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
