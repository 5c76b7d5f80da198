"""A run of a session, sent to hidden nodes where they stand for the user's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorflow.python.client import pywrap_tf_session as c_api

from ._cone import Endpoint, Request
from ._hidden import Hidden


def endpoint(output: Any) -> Endpoint:
    """The tensor that the C API's output is."""
    return c_api.TF_OperationName(output.oper), output.index


def request_of(feeds: Iterable[Any], fetches: Iterable[Any], targets: Iterable[Any]) -> Request:
    """Return what a run asks for, from what the C API is given."""
    return Request(
        tuple([endpoint(output) for output in fetches]),
        tuple([c_api.TF_OperationName(operation) for operation in targets]),
        frozenset([endpoint(output) for output in feeds]),
    )


class Route:
    """The places of a request's fetches and targets among hidden nodes.

    endpoints: the hidden tensor that stands for a fetched one.  targets: likewise for operations.
    feeds: the hidden placeholder that a fed tensor's readers read.
    also: hidden operations that run besides.  number: the hidden placeholder of the execution's number.
    """

    def __init__(
        self,
        hidden: Hidden,
        endpoints: Mapping[Endpoint, Endpoint],
        targets: Mapping[str, str],
        feeds: Mapping[Endpoint, str],
        also: Sequence[str] = (),
        number: str | None = None,
    ) -> None:
        self.prefix = hidden.prefix
        self._names = dict(endpoints)
        self._target_names = dict(targets)
        self._also_names = list(also)
        self.number_name = number
        self._outputs = {own: hidden.output(*other) for own, other in endpoints.items()}
        self._targets = {own: hidden.operations[other] for own, other in targets.items()}
        self.feed_names = dict(feeds)
        self._feeds = {own: hidden.output(other, 0) for own, other in feeds.items()}
        self._also = [hidden.operations[name] for name in also]
        self.number = None if number is None else hidden.output(number, 0)

    def fetches(self, fetches: Sequence[Any]) -> list[Any]:
        """The outputs that are fetched instead."""
        return [self._outputs.get(endpoint(output), output) for output in fetches]

    def targets(self, targets: Sequence[Any]) -> list[Any]:
        """The operations that are run instead."""
        return [*(self._targets.get(c_api.TF_OperationName(one), one) for one in targets), *self._also]

    def feeds(self, feeds: Mapping[Any, Any], number: int | None) -> dict[Any, Any]:
        """Values for the placeholders of the copy, and for the user's, which it may read through."""
        given = dict(feeds)
        for output, value in feeds.items():
            other = self._feeds.get(endpoint(output))
            if other is not None:
                given[other] = value
        if self.number is not None and number is not None:
            given[self.number] = np.asarray(number, np.int64)
        return given

    def all_feeds(self, feeds: Sequence[Any]) -> list[Any]:
        """The outputs that are fed in all."""
        return list(self.feeds(dict.fromkeys(feeds), 0))

    def tensor_name(self, name: str) -> str:
        """The name of the tensor that is fetched instead of one of that name."""
        op, _, index = name.partition(":")
        other = self._names.get((op, int(index or 0)))
        return name if other is None else f"{self.prefix}{other[0]}:{other[1]}"

    def target_names(self, names: Iterable[str]) -> list[str]:
        """The names of the operations that are run instead."""
        own = [
            self.prefix + self._target_names[name] if name in self._target_names else name for name in names
        ]
        return [*own, *(self.prefix + name for name in self._also_names)]
