"""Programs of one function for the tools of a layer, by the values that routines in them read."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from amanda.backend import Action, OpFacts, State
from amanda.graph import History, Reading
from jax._src import core, source_info_util

from ._inputs import LiftedArrays
from ._reads import JaxReads, reads_of
from ._traces import is_within_jit


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
    def tracing(self, action: Action) -> Iterator[LiftedArrays]:
        """Context in which a routine becomes a part of the program, without what it sets of its tool."""
        with self.reads.tracing([action]):
            held: list[Any] = []
            yield LiftedArrays(self.reads, self.lifted, held)
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


def note_unseen(what: str, reason: str) -> None:
    """Report ops that no tool sees, at each call of the program that is traced if there is one."""
    if _thread.at is None:
        State.current().report(what, reason)
    else:
        _thread.at[1].report(what, reason)


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
