"""Programs of one function for the tools of a stack, by the values that routines in them read.

Arrays that routines read are inputs of a program, for which they are read at each call.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import FunctionType, ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

import jax
from amanda import interceptor
from amanda.backend import Action, OpFacts, Reads, State
from amanda.graph import History, Reading
from jax._src import core, pjit, source_info_util
from jax._src.interpreters import partial_eval as pe

from ._tensors import Arrays
from ._traces import ARRAYS, is_within_jit

_CONSTANT = (FunctionType, ModuleType, type)


class JaxReads(Reads):
    """Values that routines read; those of arrays that are inputs of a program may be others of that type."""

    opaque: ClassVar[frozenset[str]] = frozenset({"amanda", "numpy", "jax", "jaxlib", "autoray"})

    def __init__(self) -> None:
        super().__init__()
        self.inputs: set[tuple[int, Any]] = set()
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
        return self.is_same(now, place.value)

    @property
    def guards(self) -> bool:
        """True if a call of the program has to look at what was read."""
        return any(not (isinstance(one.value, _CONSTANT) or callable(one.value)) for one in self)


def reads_of(action: Action) -> JaxReads:
    """Return what a routine reads now, and what it sets beyond itself."""
    reads = JaxReads()
    reads.follow(action)
    reads.settle(())
    return reads


class Variant:
    """The programs of one function while values that routines read are as they were.

    history: of these values.  trace: of the function.  inputs: places, by the ids of constants.
    """

    def __init__(self, number: int, history: History) -> None:
        self.number, self.history = number, history
        self.reads = JaxReads()
        self.trace: Any = None
        self.inputs: dict[int, Reading] = {}
        self._made: list[Any] = []  # their ids stay
        self._traced: list[tuple[Action, list[Any]]] = []
        self._reports: dict[tuple[str, str], None] = {}

    @contextmanager
    def tracing(self, action: Action) -> Iterator["LiftedArrays"]:
        """Context in which a routine becomes a part of the program, without what it sets of its tool."""
        lifted = LiftedArrays(self)
        with self.reads.tracing([action]):
            yield lifted
        self._traced.append((action, lifted.held))

    def report(self, what: str, reason: str) -> None:
        """Note what the program does otherwise than its routines say, to be told at each call."""
        self._reports[what, reason] = None

    def reports(self) -> list[tuple[str, str]]:
        """Return what there is to be told."""
        return [*self._reports, *self.reads.unfollowed(self._traced, "a program")]

    def lifted(self, place: Reading) -> Any:
        """Return the symbol of the program's input that a place is read for."""
        with core.set_current_trace(core.eval_trace):
            own = jax.numpy.array(place.value)
        self._made.append(own)
        self.inputs[id(own)] = place
        self.reads.inputs.add(place.key)
        return self.trace.new_const(own, source_info_util.current())


class LiftedArrays(Arrays):
    """Symbols for routines in a program, in which arrays that a routine reads are inputs of the program.

    held: arrays that routines compute with and that no name in their code leads to.
    """

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self.held: list[Any] = []

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine on symbols; put what it computes into the program."""
        return super().call_isolated(partial(self._lifted, partial(func, **kwargs)), values, {})

    def _lifted(self, func: Callable[..., Any], *values: Any) -> Any:
        closed, form = jax.make_jaxpr(func, return_shape=True)(*values)
        places = [one for one in self._variant.reads if isinstance(one.value, ARRAYS)]
        consts = [self._const(one, places) for one in closed.consts]
        results = core.eval_jaxpr(closed.jaxpr, consts, *jax.tree_util.tree_leaves(values))
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(form), results)

    def _const(self, const: Any, places: Sequence[Reading]) -> Any:
        place = next((one for one in places if _is_of(const, one.value)), None)
        if place is not None:
            return self._variant.lifted(place)
        if isinstance(const, jax.Array):
            self.held.append(const)
        return const


def _is_of(const: Any, value: Any) -> bool:
    """Return True if a constant of a program is a value: JAX has its own objects for arrays of NumPy."""
    if const is value or not (isinstance(const, np.ndarray) and isinstance(value, np.ndarray)):
        return const is value
    return const.shape == value.shape and const.ctypes.data == value.ctypes.data


class Function:
    """A function of the user, with one variant for each set of values that routines read.

    call: the function under the other name by which JAX knows it for the tools of a stack.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        reference = weakref.ref(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if (variant := _VARIANT.get()) is not None:
                variant.trace = core.trace_ctx.trace
            return reference()(*args, **kwargs)  # type: ignore[misc]

        del call.__wrapped__
        self.call = call
        self._history = History(JaxReads)
        self._all: list[Variant] = []

    @contextmanager
    def variant(self) -> Iterator[Variant]:
        """Context in which the function is called or traced, for the values of now."""
        variant = next((one for one in self._all if one.reads.hold()), None)
        if variant is None:
            variant = Variant(len(self._all), self._history)
            self._all.append(variant)
        token = _VARIANT.set(variant)
        try:
            yield variant
        finally:
            _VARIANT.reset(token)
            self._history.take(variant.reads)


_VARIANT: ContextVar[Variant | None] = ContextVar("variant of the function that is traced", default=None)


def followed(action: Action) -> Variant | None:
    """Return the variant that is traced; None where a traceable routine has to run at each execution."""
    variant = _VARIANT.get()
    if variant is None or reads_of(action).written:
        return None
    changing = variant.history.volatile_name(action)
    if changing:
        why = f"what it reads changes often: {changing}, so it runs as Python"
        variant.report(f"traceable {action}", why)
        return None
    return variant


def report(what: str, reason: str, source: str = "") -> None:
    """Report something, at each call of the program that is traced if there is one."""
    variant = _VARIANT.get()
    if variant is None:
        State.current().report(what, reason, source)
    else:
        variant.report(what, reason)


def guard(action: Action, facts: OpFacts) -> None:
    """Trace the program anew for other values that a routine reads which is a part of it in any case.

    Report where other values would not be seen.
    """
    reads, variant = reads_of(action), _VARIANT.get()
    if not is_within_jit() or not (reads.guards or reads.written):
        return
    changing = "" if variant is None else variant.history.volatile_name(action)
    if reads.written:
        why = f"it sets {', '.join(reads.written)}, as the function is traced"
    elif changing:
        why = f"what it reads changes often: {changing}"
    elif variant is None:
        why = "what it reads is not followed where a backward pass runs outside of jit"
    else:
        variant.reads.follow(action)
        return
    told = f"{why}; it stays as it was when the function was traced"
    report(f"{action} of {facts.name}", told, facts.source)


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
