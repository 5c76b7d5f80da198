"""Functions that run in another state than their caller's: replays, recomputations, steps of generators."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from amanda import interceptor
from amanda.plan.run_dicts import RunRecord
from amanda.scope.state import State, activated, in_force

P = ParamSpec("P")
T = TypeVar("T")


def bind_to_current_place(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose ops have the ids, and the tools, of the place where this call is made.

    For what a framework runs again elsewhere, such as a checkpoint in the backward pass, on any thread.
    If a scope of that place has closed meanwhile, the tools are those of the place where the function runs.
    Where no scope is in force it is the function itself.
    """
    activation = interceptor.active()
    if activation is None:
        return function
    # Taken here, at the place of the first run: ids depend on where the program is.
    snapshot, scopes = interceptor.snapshot(), activation.state.scopes

    def replay(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function with the ids of the first place, and its tools unless a scope has closed."""
        has_scope_closed = any(scope.closed for scope in scopes)
        activation_here = interceptor.active() if has_scope_closed else None
        with in_force(activation_here or activation):
            result: T = snapshot.replay(function, *args, **kwargs)
            return result

    return replay


class Recomputation:
    """A part of the program that a framework runs at this place, and runs again later.

    Ops that run again have the ids, the tools and the `run` of their first execution, except for tensors in
    it.  Routines with a parameter `recomputed` are told, and observers without one are not called.
    """

    def __init__(self) -> None:
        self._call_at_place: Callable[..., object] = bind_to_current_place(_call)
        self._record = RunRecord()

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Return a context for the part of the program that may run again."""
        state = State.current()
        try:
            with activated(replace(state, checkpoint_records=(*state.checkpoint_records, self._record))):
                yield
        finally:
            # Also after an exception: a framework may catch it and compute the part again.
            self._record.drop_tensors()

    def run_first(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function, which is the part of the program, for the first time; record its executions.

        Args:
            function: Function that computes the part of the program.
            *args: Positional arguments of the function.
            **kwargs: Keyword arguments of the function.
        """
        return self._call_at_place(self._run_recorded, function, *args, **kwargs)  # type: ignore[return-value]

    def rerun(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function again, as if at the place of the first run, on any thread.

        Args:
            function: Function that computes the part of the program.
            *args: Positional arguments of the function.
            **kwargs: Keyword arguments of the function.
        """
        return self._call_at_place(self._run_recomputed, function, *args, **kwargs)  # type: ignore[return-value]

    def _run_recorded(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self.first_run():
            return function(*args, **kwargs)

    def _run_recomputed(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function whose executions have the dicts `run` of the recorded executions."""
        # Not recorded once more: the executions are in the record already.
        executions = self._record.recomputed_executions()
        with activated(replace(State.current(), checkpoint_records=(), recomputed_executions=executions)):
            return function(*args, **kwargs)


def recomputable(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function for a framework that calls it once here, and then again, as a checkpoint does.

    Where no scope is in force it is the function itself.
    """
    if interceptor.active() is None:
        return function
    recomputation, has_run = Recomputation(), False

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function: recorded in the first call, as a recomputation in all later calls."""
        nonlocal has_run
        # The framework does not say which call is the first execution, but that is the first call.
        run_at_place = recomputation.rerun if has_run else recomputation.run_first
        has_run = True
        return run_at_place(function, *args, **kwargs)

    return run


def _call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    return function(*args, **kwargs)


EnterContext = Callable[[], AbstractContextManager[Any]]


def run_steps_in(
    enter: EnterContext, function: Callable[..., Generator[Any, Any, Any]]
) -> Callable[..., Any]:
    """Return a generator function, each of whose steps runs in a context that `enter` makes.

    A step runs from one `yield` of the generator to the next.
    """

    @functools.wraps(function)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        """Pass values, exceptions and the end on between the caller and the generator, as `yield from`."""
        generator = function(*args, **kwargs)
        # The next step, and its argument: what the caller sends in, or throws in.
        resume: Callable[[Any], Any] = generator.send
        from_caller: Any = None
        while True:
            try:
                with enter():
                    value = resume(from_caller)
            except StopIteration as stop:
                return stop.value
            try:
                from_caller = yield value
                resume = generator.send
            except GeneratorExit:
                with enter():
                    generator.close()
                raise
            except BaseException as error:
                # An exception that the caller throws in is raised at the `yield` of the generator, in the
                # next step.
                resume, from_caller = generator.throw, error

    return generate


def run_async_steps_in(
    enter: EnterContext, function: Callable[..., AsyncGenerator[Any, Any]]
) -> Callable[..., Any]:
    """Return an async generator function, each of whose steps runs in a context that `enter` makes."""

    @functools.wraps(function)
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        """Pass values, exceptions and the end on between the caller and the generator."""
        generator = function(*args, **kwargs)
        resume: Callable[[Any], Any] = generator.asend
        from_caller: Any = None
        while True:
            try:
                with enter():
                    value = await resume(from_caller)
            except StopAsyncIteration:
                return
            try:
                from_caller = yield value
                resume = generator.asend
            except GeneratorExit:
                with enter():
                    await generator.aclose()
                raise
            except BaseException as error:
                resume, from_caller = generator.athrow, error

    return generate
