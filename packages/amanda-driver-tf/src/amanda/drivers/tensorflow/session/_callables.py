"""Callables that a session makes of options, as Keras does: their fetches have names, not objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from amanda import interceptor
from tensorflow.core.protobuf import config_pb2

from ._cone import Endpoint, Request

if TYPE_CHECKING:
    from ._boundary import Boundary
    from ._run import Route


class Callables:
    """The options that callables were made of while a scope was open, and what stands for them."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._options: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._routed: WeakKeyDictionary[Any, tuple[Route, Any]] = WeakKeyDictionary()

    def make(self, make: Any, session: Any, options: Any) -> Any:
        """Make a callable and remember what of."""
        made = make(session, options)
        self._options[made] = config_pb2.CallableOptions.FromString(options.SerializeToString())
        return made

    def call(self, call: Any, made: Any, *args: Any, **kwargs: Any) -> Any:
        """Call one, or what stands for it."""
        activation = interceptor.active()
        if activation is None:
            return call(made, *args, **kwargs)
        options = self._options.get(made)
        if options is None:
            activation.state.report(
                "a session's callable", "it was made of options before the scope; make it within a scope"
            )
            return call(made, *args, **kwargs)
        prepared = self._boundary.prepared(made._session, _request(options), activation.state)
        if prepared is None:
            return call(made, *args, **kwargs)
        route, execution = prepared
        stand_in = self._stand_in(made, options, route)
        args = (*args, *_also_fed(args, options, route), np.asarray(execution.number, np.int64))
        with self._boundary.under_way(route, execution):
            return call(stand_in, *args, **kwargs)

    def _stand_in(self, made: Any, options: Any, route: Route) -> Any:
        known = self._routed.get(made)
        if known is None or known[0] is not route:
            known = route, type(made)(made._session, _rerouted(options, route))
            self._routed[made] = known
        return known[1]


def _request(options: Any) -> Request:
    connected = [connection.to_tensor for connection in options.tensor_connection]
    return Request(
        tuple(_endpoint(name) for name in options.fetch),
        tuple(options.target),
        frozenset(_endpoint(name) for name in (*options.feed, *connected)),
    )


def _endpoint(name: str) -> Endpoint:
    op, _, index = name.partition(":")
    return op, int(index or 0)


def _rerouted(options: Any, route: Route) -> Any:
    """Options that fetch and run what stands for the user's tensors and operations."""
    rerouted = config_pb2.CallableOptions.FromString(options.SerializeToString())
    rerouted.ClearField("fetch")
    rerouted.ClearField("target")
    rerouted.fetch.extend(route.tensor_name(name) for name in options.fetch)
    rerouted.target.extend(route.target_names(options.target))
    hidden = [
        route.feed_names[_endpoint(name)] for name in options.feed if _endpoint(name) in route.feed_names
    ]
    rerouted.feed.extend(f"{route.prefix}{name}:0" for name in (*hidden, route.number_name))
    for connection in options.tensor_connection:
        other = route.feed_names.get(_endpoint(connection.to_tensor))
        if other is not None:
            rerouted.tensor_connection.add(
                from_tensor=connection.from_tensor, to_tensor=f"{route.prefix}{other}:0"
            )
    return rerouted


def _also_fed(args: tuple[Any, ...], options: Any, route: Route) -> list[Any]:
    """Values for the placeholders of the copy."""
    return [
        value for name, value in zip(options.feed, args, strict=False) if _endpoint(name) in route.feed_names
    ]
