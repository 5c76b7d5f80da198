"""Threads and tasks of pools that start inside a scope belong to it; and the thread that a routine serves.

Python starts a thread in an empty context, so the patched functions pass on the state of the starting thread.
The threads of a pool serve the whole program: they start outside of scopes, and each task carries a state.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial, wraps
from typing import Any

from amanda import interceptor
from amanda.interceptor.attributes import Patches
from amanda.interceptor.imports import when_imported
from amanda.interceptor.interrupts import undo
from amanda.scope.replay import run_steps_in
from amanda.scope.state import State, activated

Function = Callable[..., Any]


class Threads:
    """Patches of the functions of the standard library that start threads, so that threads get scopes."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._import_watches: list[Callable[[], object]] = []  # functions that cancel them

    def attach(self) -> None:
        """Patch the functions; modules that are not imported yet are patched at their import."""
        self._replace(threading.Thread, "start", _start_in_scopes)
        # Libraries that start threads without `threading.Thread`: position 0 is the function to run.
        for name in ("start_new_thread", "start_new"):
            self._replace(_thread, name, _pass_scopes, 0)
        for module, patch in (
            ("concurrent.futures", self._patch_futures),
            ("concurrent.futures.thread", self._patch_executors),
            ("multiprocessing.pool", self._patch_pools),
        ):
            # A program that never imports them does not pay for their import.
            self._import_watches.append(when_imported(module, partial(patch, module)))

    def detach(self) -> None:
        """Restore the original functions."""
        undo(self._import_watches)
        self._patches.restore()

    def _replace(
        self, holder: Any, name: str, make_stand_in: Callable[..., Function], *parameters: int | str
    ) -> None:
        """Replace a function by a stand-in, if this version of Python has the function.

        parameters: further arguments of `make_stand_in`, such as those of `_pass_scopes`.
        """
        # `start_new` is an obsolete alias, which a version of Python may lack.
        original = getattr(holder, name, None)
        if original is not None:
            self._patches.set(holder, name, wraps(original)(make_stand_in(original, *parameters)))

    def _patch_futures(self, module: str) -> None:
        """Run callbacks of futures in the scopes in which they were added."""
        self._replace(sys.modules[module].Future, "add_done_callback", _pass_scopes, 1, "fn")

    def _patch_executors(self, module: str) -> None:
        """Run tasks and initializers of executors in the scopes in which they were submitted."""
        executor = sys.modules[module].ThreadPoolExecutor
        self._replace(executor, "__init__", _pass_scopes, 3, "initializer")
        self._replace(executor, "submit", _pass_scopes, 1)

    def _patch_pools(self, module: str) -> None:
        """Run tasks, callbacks and iterables of pools in the scopes in which they were submitted."""
        pool = sys.modules[module].ThreadPool
        # Positions, of which 0 is `self`, and keywords of the parameters that hold functions and iterables.
        callbacks = (4, "callback", 5, "error_callback")
        self._replace(pool, "__init__", _pass_scopes, 2, "initializer")
        self._replace(pool, "apply_async", _pass_scopes, 1, "func", *callbacks)
        for name in ("map", "starmap", "map_async", "starmap_async"):
            self._replace(pool, name, _pass_scopes, 1, "func", 2, "iterable", *callbacks)
        for name in ("imap", "imap_unordered"):
            self._replace(pool, name, _pass_scopes, 1, "func", 2, "iterable")


def _start_in_scopes(original: Function) -> Function:
    """Return a stand-in for `Thread.start`: the thread runs in the state of the starting thread."""

    def start(self: threading.Thread) -> None:
        """Start the thread; inside of scopes, with a `run` that puts their state in force.

        A thread whose class keeps its own `run` is reported.
        """
        state, attributes = _inherited_state(), vars(self)
        if not state.scopes:
            # With -X thread_inherit_context a thread inherits the state; a thread of a routine must not.
            with activated(state):
                original(self)
            return
        run = self.run
        # Empty unless the program has set `run` on this thread itself.
        instance_run = {"run": attributes["run"]} if "run" in attributes else {}
        # Popped by the thread, so that a thread that outlives its scopes does not keep their state.
        states_to_take = [state]

        def restore_run() -> None:
            attributes.pop("run", None)
            attributes.update(instance_run)

        def run_in_scopes() -> None:
            restore_run()
            with activated(states_to_take.pop()):
                run()

        attributes["run"] = run_in_scopes  # an instance attribute hides the `run` of any subclass
        if self.run is not run_in_scopes:
            reason = f"{type(self).__name__}.run cannot be set: give it scope.bind(function)"
            state.report(f"thread {self.name}", reason)
        del state  # this frame must not keep it either
        try:
            original(self)
        except BaseException:
            restore_run()
            raise

    return start


def _pass_scopes(original: Function, *parameters: int | str) -> Function:
    """Return a stand-in for a function: callables and iterables that it is given run in the caller's scopes.

    parameters: positions and keywords of the arguments that are such callables and iterables.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        """Stand-in for `original`: binds its arguments to the caller's scopes, and calls it in no scope."""
        state = _inherited_state()
        bound_args = [
            _bound_to_scopes(value, state) if position in parameters else value
            for position, value in enumerate(args)
        ]
        bound_kwargs = {
            name: _bound_to_scopes(value, state) if name in parameters else value
            for name, value in kwargs.items()
        }
        # The pool may start its threads in this call: they serve the whole program, so they start in no
        # scope.
        with activated(State()):
            return original(*bound_args, **bound_kwargs)

    return call


def _bound_to_scopes(value: Any, state: State) -> Any:
    """Wrap a callable or iterable so that another thread runs it in the caller's scopes.

    Returns the value itself where no scope is open, and for None, lists, tuples and ranges.
    """
    if not state.scopes:
        return value
    if callable(value):
        return _BoundFunction(value, state)
    # Iterating these runs none of the program's code.
    if value is None or isinstance(value, (list, tuple, range)):
        return value
    return _BoundCollection(value, state) if isinstance(value, Sized) else _BoundIterable(value, state)


class _BoundValue:
    """A value of the program, and the state in which another thread uses it."""

    def __init__(self, value: Any, state: State) -> None:
        self._value = value
        self._state = state

    def __reduce__(self) -> tuple[Any, ...]:  # a pickle goes to another process, which has no scope
        return _identity, (self._value,)


class _BoundFunction(_BoundValue):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with activated(self._state):
            return self._value(*args, **kwargs)


class _BoundIterable(_BoundValue):
    def __iter__(self) -> Iterator[Any]:
        return run_steps_in(partial(activated, self._state), _iterate)(self._value)  # type: ignore[no-any-return]


class _BoundCollection(_BoundIterable):
    def __len__(self) -> int:
        return len(self._value)


def _iterate(iterable: Iterable[Any]) -> Any:
    yield from iterable


def _identity(value: Any) -> Any:
    return value


def _inherited_state() -> State:
    """Return the state for a thread that starts here: State() if a routine starts the thread."""
    activation = interceptor.ACTIVATION.get(None)
    if activation is None or type(activation.state) is not State:
        return State()
    is_in_routine = activation.active and interceptor.active() is None  # routines run under a suspension
    return State() if is_in_routine else activation.state.without_closed_scopes()


class Caller:
    """A thread that executes a program; it lives as long as the thread."""


class _ThreadCallers(threading.local):
    """The callers of one thread: the thread's own, and the one whose graph calls back on it."""

    thread_caller: Caller | None = None
    served: Caller | None = None


_thread_callers = _ThreadCallers()


def caller() -> Caller | None:
    """Return the caller that this routine runs for; None on a framework's thread where that is unknown."""
    if _thread_callers.served is not None:
        return _thread_callers.served
    if _thread_callers.thread_caller is None:
        # A thread that C code started executes no program of its own: Python has a dummy object for it.
        started_in_c = isinstance(threading.current_thread(), threading._DummyThread)
        if not started_in_c:
            _thread_callers.thread_caller = Caller()
    return _thread_callers.thread_caller


class serving:
    """Context in which routines run for a caller; a class, since graphs enter it at each routine."""

    __slots__ = ("_caller", "_outer_caller")

    def __init__(self, caller: Caller | None) -> None:
        self._caller = caller

    def __enter__(self) -> None:
        self._outer_caller, _thread_callers.served = _thread_callers.served, self._caller

    def __exit__(self, *_: object) -> None:
        _thread_callers.served = self._outer_caller
