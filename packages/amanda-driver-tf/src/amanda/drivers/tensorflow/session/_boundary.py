"""Runs of sessions: every way that leads from Python into the runtime."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, finalize

from amanda import interceptor
from amanda.backend import Attributes, Execution, State
from tensorflow.python.client.session import BaseSession
from tensorflow.python.framework import errors_impl

from .._recording import allow_tapes_in_routines
from ._callables import Callables
from ._cone import Request
from ._run import Route, endpoint, request_of

Prepare = Callable[[Any, Request, State], "tuple[Route, Execution] | None"]


class Boundary:
    """Sends the runs of sessions to what `prepare` has put beside the user's nodes."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._callables = Callables(self)
        self._partial: WeakKeyDictionary[Any, dict[str, _PartialRun]] = WeakKeyDictionary()
        self._local = threading.local()

    def attach(self, attributes: Attributes) -> None:
        """Take the place of the methods through which sessions run, until `attributes` are restored."""
        made = BaseSession._Callable
        for holder, name, stand_in in (
            (BaseSession, "_call_tf_sessionrun", self._run),
            (BaseSession, "_call_tf_sessionprun", self._run_partly),
            (BaseSession, "_do_call", self._do_call),
            (BaseSession, "_make_callable_from_options", self._callables.make),
            (made, "__call__", self._callables.call),
        ):
            attributes.set(holder, name, _method(stand_in, vars(holder)[name]))
        allow_tapes_in_routines(attributes)

    def prepared(self, session: Any, request: Request, state: State) -> tuple[Route, Execution] | None:
        """Return what stands for a run; None where nothing is instrumented."""
        prepared = self._prepare(session, request, state)
        if prepared is not None:
            session._extend_graph()
        return prepared

    def _prepared_now(
        self, session: Any, feeds: Any, fetches: Any, targets: Any
    ) -> tuple[Route, Execution] | None:
        activation = interceptor.active()
        if activation is None:
            return None
        return self.prepared(session, request_of(feeds, fetches, targets), activation.state)

    def _run(
        self, run: Any, session: Any, options: Any, feeds: Any, fetches: Any, targets: Any, metadata: Any
    ) -> Any:
        prepared = self._prepared_now(session, feeds, fetches, targets)
        if prepared is None:
            return run(session, options, feeds, fetches, targets, metadata)
        route, execution = prepared
        feeds = route.feeds(feeds, execution.number)
        with self.under_way(route, execution):
            return run(session, options, feeds, route.fetches(fetches), route.targets(targets), metadata)

    @contextmanager
    def under_way(self, route: Route, execution: Execution, whole: bool = True) -> Iterator[None]:
        """Context around a run, or a part: errors of routines as themselves, others in the user's names."""
        told: BaseException | None = None
        try:
            with execution.under_way() if whole else execution.part():
                try:
                    yield
                except errors_impl.OpError as error:
                    error._message = error.message.replace(route.prefix, "")
                    told = error
                    raise
        except errors_impl.OpError as error:
            if error is not told and getattr(self._local, "called", False):
                self._local.own = error
            raise

    def _do_call(self, call: Any, session: Any, function: Any, *args: Any) -> Any:
        if function.__name__ == "_setup_fn":
            return self._set_up(call, session, function, *args)
        outer = getattr(self._local, "called", False)
        self._local.called, self._local.own = True, None
        try:
            return call(session, function, *args)
        except errors_impl.OpError:
            own = self._local.own
            if own is None:
                raise
        finally:
            self._local.called, self._local.own = outer, None
        raise own  # the session would have made another of it

    def _set_up(
        self, call: Any, session: Any, function: Any, c_session: Any, feeds: Any, fetches: Any, targets: Any
    ) -> Any:
        prepared = self._prepared_now(session, feeds, fetches, targets)
        if prepared is None:
            return call(session, function, c_session, feeds, fetches, targets)
        route, execution = prepared
        handle = call(
            session, function, c_session, route.all_feeds(feeds), route.fetches(fetches),
            route.targets(targets),
        )  # fmt: skip
        self._partial.setdefault(session, {})[handle] = _PartialRun(route, execution, fetches)
        return handle

    def _run_partly(self, run: Any, session: Any, handle: Any, feeds: Any, fetches: Any) -> Any:
        partial = self._partial.get(session, {}).get(handle)
        if partial is None:
            return run(session, handle, feeds, fetches)
        feeds = partial.route.feeds(feeds, None if partial.begun else partial.execution.number)
        try:
            with self.under_way(partial.route, partial.execution, whole=False):
                result = run(session, handle, feeds, partial.route.fetches(fetches))
        except BaseException:
            del self._partial[session][handle]  # no part comes after one that failed
            raise
        partial.begun = True
        partial.left -= {endpoint(output) for output in fetches}
        if not partial.left:
            del self._partial[session][handle]
        return result


class _PartialRun:
    """A run that is fed and fetched in several parts; it calls back between them too.

    left: what has not been fetched.
    """

    def __init__(self, route: Route, execution: Execution, fetches: Any) -> None:
        self.route = route
        self.execution = execution
        self.begun = False
        self.left = {endpoint(output) for output in fetches}
        execution.begin()
        finalize(self, execution.end)


def _method(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gives the original to a stand-in, before its own arguments."""

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return stand_in(original, *args, **kwargs)

    return method
