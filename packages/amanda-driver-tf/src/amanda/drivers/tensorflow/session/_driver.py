"""The driver of session graphs, and stand-ins for the methods by which sessions enter the runtime."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import numpy as np

from amanda import backend, interceptor
from amanda.backend import Execution, GraphAnalysis, Patches, SelfTestProgram, State
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client.session import BaseSession
from tensorflow.python.eager import context
from tensorflow.python.framework import errors_impl

from .._requirements import NEWEST_TESTED, PRIVATE_NAMES, session_self_test
from .._tensors import allow_tapes_in_routines
from ..graph import GraphTensorOps, TensorFlowReads
from ._copies import Route, SessionRewriting, SessionRun, add_copy, endpoint_of, request_of, rewrite_run
from ._kernel_state import SessionExecution
from ._operations import Endpoint, RunRequest


class GraphDriver(backend.GraphDriver[SessionRewriting, Route]):
    """Instruments TensorFlow's sessions: runs edited copies beside the operations of the user's graph."""

    api = 2
    framework = "tensorflow"
    modes = ("graph",)
    newest_tested = NEWEST_TESTED
    private_names = PRIVATE_NAMES["graph"]
    tensors = GraphTensorOps()
    reads_type = TensorFlowReads

    def __init__(self) -> None:
        super().__init__()
        self._boundary = SessionBoundary(self._prepare_run)

    def attach(self) -> None:
        """Patch the methods through which sessions run."""
        self._boundary.attach(self.patches)

    def self_test_program(self) -> SelfTestProgram:
        """Return a program of a session with one op, and its gradient."""
        return session_self_test()

    def rewriting_context(self) -> AbstractContextManager[Any]:
        """Return a context of eager mode, so that traced routines do not enter the user's graph."""
        eager: AbstractContextManager[Any] = context.eager_mode()
        return eager

    def new_execution(self, state: State, table: Mapping[int, Any]) -> SessionExecution:
        """Return the execution of one run of a copy."""
        return SessionExecution(state, self.tensors, table)

    def rewrite(self, graph: SessionRun, analysis: GraphAnalysis) -> SessionRewriting:
        """Rewrite the part of a session's graph that a request runs."""
        return rewrite_run(graph, analysis, self.namespace)

    def build_runnable(self, graph: SessionRun, rewriting: SessionRewriting) -> Route:
        """Put the copy beside the user's nodes."""
        return add_copy(graph, rewriting)

    def _prepare_run(self, session: Any, request: RunRequest, state: State) -> tuple[Route, Execution] | None:
        """Return the route and the execution of a run; None where it runs uninstrumented.

        Reports a session of a server, whose runs are such.
        """
        if session._target:
            state.report("a session of a server", "routines cannot be called in its process")
            return None
        # The copies belong to the graph: they are nodes of it, and die with it.
        route_and_execution = self.prepare(SessionRun(session, request), state, request, owner=session.graph)
        if route_and_execution is None:
            return None
        route, execution = route_and_execution
        assert isinstance(execution, SessionExecution)
        execution.session = ref(session)
        return route, execution


Prepare = Callable[[Any, RunRequest, State], "tuple[Route, Execution] | None"]


class SessionBoundary:
    """Sends the runs of sessions to instrumented copies, which `prepare` puts beside the user's nodes."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._callables = Callables(self)
        self._partial_runs_by_session: WeakKeyDictionary[Any, dict[str, _PartialRun]] = WeakKeyDictionary()
        self._thread_local = threading.local()

    def attach(self, patches: Patches) -> None:
        """Patch the methods through which sessions run, and tapes, until `patches` are restored."""
        callable_class = BaseSession._Callable
        for holder, name, stand_in in (
            (BaseSession, "_call_tf_sessionrun", self._stand_in_for_run),
            (BaseSession, "_call_tf_sessionprun", self._stand_in_for_partial_run),
            (BaseSession, "_do_call", self._stand_in_for_do_call),
            (BaseSession, "_make_callable_from_options", self._callables.make),
            (callable_class, "__call__", self._callables.call),
        ):
            patches.set(holder, name, _method_with_original(stand_in, vars(holder)[name]))
        allow_tapes_in_routines(patches)

    def prepare_run(self, session: Any, request: RunRequest, state: State) -> tuple[Route, Execution] | None:
        """Return the route to the copy for a run, and its execution; None where nothing is instrumented.

        Extends the session by the copy's nodes.
        """
        route_and_execution = self._prepare(session, request, state)
        if route_and_execution is not None:
            # A session takes over new nodes of the graph at its next run; here they are needed in this run.
            session._extend_graph()
        return route_and_execution

    def _prepare_in_scope(
        self, session: Any, feeds: Any, fetches: Any, targets: Any
    ) -> tuple[Route, Execution] | None:
        """Return the route and execution for a run, from the arguments of the C API; None outside scopes."""
        activation = interceptor.active()
        if activation is None:
            return None
        return self.prepare_run(session, request_of(feeds, fetches, targets), activation.state)

    def _stand_in_for_run(
        self, run: Any, session: Any, options: Any, feeds: Any, fetches: Any, targets: Any, metadata: Any
    ) -> Any:
        """Stand-in for `_call_tf_sessionrun`: runs the instrumented copy, if there is one."""
        route_and_execution = self._prepare_in_scope(session, feeds, fetches, targets)
        if route_and_execution is None:
            return run(session, options, feeds, fetches, targets, metadata)
        route, execution = route_and_execution
        feeds = route.feeds(feeds, execution.number)
        fetches, targets = route.fetches(fetches), route.targets(targets)
        with self.run_context(route, execution):
            return run(session, options, feeds, fetches, targets, metadata)

    @contextmanager
    def run_context(self, route: Route, execution: Execution, is_part: bool = False) -> Iterator[None]:
        """Return a context around a run, or, where `is_part` is True, around a part of a partial run.

        Errors of routines are raised as they are; errors of TensorFlow name the user's nodes, not the copy's.
        """
        tensorflow_error: BaseException | None = None  # raised by the run itself
        try:
            with execution.raising_routine_error() if is_part else execution.running():
                try:
                    yield
                except errors_impl.OpError as error:
                    # The prefix of hidden nodes is cut off, so the message has the names of the user's nodes.
                    error._message = error.message.replace(route.prefix, "")
                    tensorflow_error = error
                    raise
        except errors_impl.OpError as error:
            # The execution raises a routine's error instead of TensorFlow's; `_do_call` would wrap it.
            if error is not tensorflow_error and getattr(self._thread_local, "in_session_call", False):
                self._thread_local.routine_error = error
            raise

    def _stand_in_for_do_call(self, call: Any, session: Any, function: Any, *args: Any) -> Any:
        """Stand-in for `_do_call`: raises an OpError of a routine as it is, and sets up partial runs."""
        # `partial_run_setup` has no method of its own that could be patched, only this local function.
        if function.__name__ == "_setup_fn":
            return self._set_up_partial_run(call, session, function, *args)
        outer_call = getattr(self._thread_local, "in_session_call", False)
        self._thread_local.in_session_call, self._thread_local.routine_error = True, None
        try:
            return call(session, function, *args)
        except errors_impl.OpError:
            routine_error = self._thread_local.routine_error
            if routine_error is None:
                raise
        finally:
            self._thread_local.in_session_call, self._thread_local.routine_error = outer_call, None
        # `_do_call` has raised another error in its place, with the copy's nodes in the message.
        raise routine_error

    def _set_up_partial_run(
        self, call: Any, session: Any, function: Any, c_session: Any, feeds: Any, fetches: Any, targets: Any
    ) -> Any:
        """Set up a partial run on the instrumented copy, if there is one; return TensorFlow's handle."""
        route_and_execution = self._prepare_in_scope(session, feeds, fetches, targets)
        if route_and_execution is None:
            return call(session, function, c_session, feeds, fetches, targets)
        route, execution = route_and_execution
        # All feeds and fetches of the parts are declared when the run is set up, as TensorFlow demands.
        handle = call(
            session, function, c_session, route.all_feeds(feeds), route.fetches(fetches),
            route.targets(targets),
        )  # fmt: skip
        self._partial_runs_by_session.setdefault(session, {})[handle] = _PartialRun(route, execution, fetches)
        return handle

    def _stand_in_for_partial_run(self, run: Any, session: Any, handle: Any, feeds: Any, fetches: Any) -> Any:
        """Stand-in for `_call_tf_sessionprun`: runs a part of a partial run, if it was set up in a scope.

        A part that fails, or fetches the last tensors, ends the execution.
        """
        partial_run = self._partial_runs_by_session.get(session, {}).get(handle)
        if partial_run is None:
            return run(session, handle, feeds, fetches)
        # The number is fed once, with the first part.
        number = None if partial_run.has_begun else partial_run.execution.number
        feeds = partial_run.route.feeds(feeds, number)
        try:
            with self.run_context(partial_run.route, partial_run.execution, is_part=True):
                result = run(session, handle, feeds, partial_run.route.fetches(fetches))
        except BaseException:
            del self._partial_runs_by_session[session][handle]  # no part comes after one that failed
            raise
        partial_run.has_begun = True
        partial_run.remaining_fetches -= {endpoint_of(output) for output in fetches}
        if not partial_run.remaining_fetches:
            del self._partial_runs_by_session[session][handle]
        return result


class _PartialRun:
    """A run that is fed and fetched in several parts; its routines may be called between the parts, too.

    Creation begins the execution, which ends when the object is dropped.
    has_begun: True once a part has run.  remaining_fetches: tensors that no part has fetched yet.
    """

    def __init__(self, route: Route, execution: Execution, fetches: Any) -> None:
        self.route = route
        self.execution = execution
        self.has_begun = False
        self.remaining_fetches = {endpoint_of(output) for output in fetches}
        execution.begin()
        # A partial run may be dropped before all its fetches are done.
        finalize(self, execution.end)


def _method_with_original(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a stand-in with the original method ahead of the arguments."""

    @functools.wraps(original)
    def call_stand_in(*args: Any, **kwargs: Any) -> Any:
        return stand_in(original, *args, **kwargs)

    return call_stand_in


class Callables:
    """The callables that sessions made in a scope: their options, and their routes to instrumented copies."""

    def __init__(self, boundary: SessionBoundary) -> None:
        self._boundary = boundary
        # A native callable does not tell the options that it was made of.
        self._options: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._last_routed: WeakKeyDictionary[Any, tuple[Route, Any]] = WeakKeyDictionary()

    def make(self, make: Any, session: Any, options: Any) -> Any:
        """Stand-in for `_make_callable_from_options`: remembers the options of a callable."""
        session_callable = make(session, options)
        self._options[session_callable] = config_pb2.CallableOptions.FromString(options.SerializeToString())
        return session_callable

    def call(self, call: Any, session_callable: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand-in for a callable's `__call__`: runs the copy; reports a callable from before the scope."""
        activation = interceptor.active()
        if activation is None:
            return call(session_callable, *args, **kwargs)
        options = self._options.get(session_callable)
        if options is None:
            activation.state.report(
                "a session's callable", "it was made of options before the scope; make it within a scope"
            )
            return call(session_callable, *args, **kwargs)
        route_and_execution = self._boundary.prepare_run(
            session_callable._session, _request(options), activation.state
        )
        if route_and_execution is None:
            return call(session_callable, *args, **kwargs)
        route, execution = route_and_execution
        routed_callable = self._routed_callable(session_callable, options, route)
        # In the order of the feeds in the route's options.
        number = np.asarray(execution.number, np.int64)
        args = (*args, *_values_for_placeholders(args, options, route), number)
        with self._boundary.run_context(route, execution):
            return call(routed_callable, *args, **kwargs)

    def _routed_callable(self, session_callable: Any, options: Any, route: Route) -> Any:
        """Return a callable with the names of a route's nodes; the one of the last route is used again."""
        last_route, routed_callable = self._last_routed.get(session_callable, (None, None))
        # A callable has fixed options, so each route needs its own.
        if last_route is not route:
            routed_options = _route_options(options, route)
            routed_callable = type(session_callable)(session_callable._session, routed_options)
            self._last_routed[session_callable] = route, routed_callable
        return routed_callable


def _request(options: Any) -> RunRequest:
    """Return the request of a callable's options; a tensor that is connected to another one is fed."""
    connected_names = [connection.to_tensor for connection in options.tensor_connection]
    return RunRequest(
        fetches=tuple(_parse_endpoint(name) for name in options.fetch),
        targets=tuple(options.target),
        feeds=frozenset(_parse_endpoint(name) for name in (*options.feed, *connected_names)),
    )


def _parse_endpoint(name: str) -> Endpoint:
    """Return the operation and the index in a tensor's name; a name without an index means output 0."""
    op, _, index = name.partition(":")
    return op, int(index or 0)


def _route_options(options: Any, route: Route) -> Any:
    """Return options that fetch and run the copy's nodes, and feed its placeholders and number at last."""
    routed_options = config_pb2.CallableOptions.FromString(options.SerializeToString())
    routed_options.ClearField("fetch")
    routed_options.ClearField("target")
    routed_options.fetch.extend(route.tensor_name(name) for name in options.fetch)
    routed_options.target.extend(route.target_names(options.target))
    endpoints = [_parse_endpoint(name) for name in options.feed]
    placeholders = [route.feed_names[endpoint] for endpoint in endpoints if endpoint in route.feed_names]
    routed_options.feed.extend(f"{route.prefix}{name}:0" for name in (*placeholders, route.number_name))
    for connection in options.tensor_connection:
        placeholder = route.feed_names.get(_parse_endpoint(connection.to_tensor))
        if placeholder is not None:
            routed_options.tensor_connection.add(
                from_tensor=connection.from_tensor, to_tensor=f"{route.prefix}{placeholder}:0"
            )
    return routed_options


def _values_for_placeholders(args: tuple[Any, ...], options: Any, route: Route) -> list[Any]:
    """Return those arguments of a callable that are fed to the copy's placeholders, too, in their order."""
    return [
        value
        for name, value in zip(options.feed, args, strict=False)
        if _parse_endpoint(name) in route.feed_names
    ]
