"""Callables that a session makes of CallableOptions, as Keras does, in which fetches are names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from amanda import interceptor
from tensorflow.core.protobuf import config_pb2

from ._execution_order import Endpoint, RunRequest

if TYPE_CHECKING:
    from ._boundary import SessionBoundary
    from ._route import Route


class Callables:
    """The callables that sessions made in a scope: their options, and their routes to instrumented copies."""

    def __init__(self, boundary: SessionBoundary) -> None:
        self._boundary = boundary
        self._options: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._routed: WeakKeyDictionary[Any, tuple[Route, Any]] = WeakKeyDictionary()

    def make(self, make: Any, session: Any, options: Any) -> Any:
        """Stand-in for `_make_callable_from_options`: remembers the options of a callable."""
        session_callable = make(session, options)
        self._options[session_callable] = config_pb2.CallableOptions.FromString(options.SerializeToString())
        return session_callable

    def call(self, call: Any, session_callable: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand-in for a callable's `__call__`: runs the instrumented copy, if there is one."""
        activation = interceptor.active()
        if activation is None:
            return call(session_callable, *args, **kwargs)
        options = self._options.get(session_callable)
        if options is None:
            activation.state.report(
                "a session's callable", "it was made of options before the scope; make it within a scope"
            )
            return call(session_callable, *args, **kwargs)
        prepared = self._boundary.prepare_run(session_callable._session, _request(options), activation.state)
        if prepared is None:
            return call(session_callable, *args, **kwargs)
        route, execution = prepared
        stand_in = self._routed_callable(session_callable, options, route)
        args = (*args, *_extra_feeds(args, options, route), np.asarray(execution.number, np.int64))
        with self._boundary.run_context(route, execution):
            return call(stand_in, *args, **kwargs)

    def _routed_callable(self, session_callable: Any, options: Any, route: Route) -> Any:
        routed = self._routed.get(session_callable)
        # A callable has fixed options, so each route needs one of its own.
        if routed is None or routed[0] is not route:
            routed = route, type(session_callable)(session_callable._session, _route_options(options, route))
            self._routed[session_callable] = routed
        return routed[1]


def _request(options: Any) -> RunRequest:
    """Return the request of a callable's options."""
    connected = [connection.to_tensor for connection in options.tensor_connection]
    return RunRequest(
        tuple(_parse_endpoint(name) for name in options.fetch),
        tuple(options.target),
        frozenset(_parse_endpoint(name) for name in (*options.feed, *connected)),
    )


def _parse_endpoint(name: str) -> Endpoint:
    op, _, index = name.partition(":")
    return op, int(index or 0)


def _route_options(options: Any, route: Route) -> Any:
    """Return options that fetch and run the copy's tensors and operations instead of the user's."""
    rerouted = config_pb2.CallableOptions.FromString(options.SerializeToString())
    rerouted.ClearField("fetch")
    rerouted.ClearField("target")
    rerouted.fetch.extend(route.tensor_name(name) for name in options.fetch)
    rerouted.target.extend(route.target_names(options.target))
    hidden = [
        route.feed_names[_parse_endpoint(name)]
        for name in options.feed
        if _parse_endpoint(name) in route.feed_names
    ]
    rerouted.feed.extend(f"{route.prefix}{name}:0" for name in (*hidden, route.number_name))
    for connection in options.tensor_connection:
        placeholder = route.feed_names.get(_parse_endpoint(connection.to_tensor))
        if placeholder is not None:
            rerouted.tensor_connection.add(
                from_tensor=connection.from_tensor, to_tensor=f"{route.prefix}{placeholder}:0"
            )
    return rerouted


def _extra_feeds(args: tuple[Any, ...], options: Any, route: Route) -> list[Any]:
    """Return the values that are fed to the copy's placeholders besides the user's."""
    return [
        value
        for name, value in zip(options.feed, args, strict=False)
        if _parse_endpoint(name) in route.feed_names
    ]
