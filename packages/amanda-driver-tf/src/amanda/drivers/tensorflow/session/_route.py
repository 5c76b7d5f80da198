"""The route of a session's run to hidden nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tensorflow.python.client import pywrap_tf_session as c_api

from ._execution_order import Endpoint, RunRequest
from ._hidden_nodes import HiddenImport


def endpoint_of(output: Any) -> Endpoint:
    """Return the name and index of an output of the C API."""
    return c_api.TF_OperationName(output.oper), output.index


def request_of(feeds: Iterable[Any], fetches: Iterable[Any], targets: Iterable[Any]) -> RunRequest:
    """Return the request of a run from the arguments of the C API."""
    return RunRequest(
        tuple([endpoint_of(output) for output in fetches]),
        tuple([c_api.TF_OperationName(operation) for operation in targets]),
        frozenset([endpoint_of(output) for output in feeds]),
    )


class Route:
    """The hidden nodes that a request fetches, runs and feeds instead of the user's.

    endpoints: by a fetched tensor, the hidden tensor.  targets: by a target, the hidden operation.
    feeds: by a fed tensor, the hidden placeholder.  extra: hidden operations with routines that run, too.
    number: the hidden placeholder of the execution's number.
    """

    def __init__(
        self,
        hidden: HiddenImport,
        endpoints: Mapping[Endpoint, Endpoint],
        targets: Mapping[str, str],
        feeds: Mapping[Endpoint, str],
        extra: Sequence[str] = (),
        number: str | None = None,
    ) -> None:
        self.prefix = hidden.prefix
        self._names = dict(endpoints)
        self._target_names = dict(targets)
        self._extra_names = list(extra)
        self.number_name = number
        self._outputs = {vanilla: hidden.output(*hidden_name) for vanilla, hidden_name in endpoints.items()}
        self._targets = {vanilla: hidden.operations[hidden_name] for vanilla, hidden_name in targets.items()}
        self.feed_names = dict(feeds)
        self._feeds = {vanilla: hidden.output(hidden_name, 0) for vanilla, hidden_name in feeds.items()}
        self._extra_targets = [hidden.operations[name] for name in extra]
        self.number = None if number is None else hidden.output(number, 0)

    def fetches(self, fetches: Sequence[Any]) -> list[Any]:
        """Return the outputs that are fetched instead."""
        return [self._outputs.get(endpoint_of(output), output) for output in fetches]

    def targets(self, targets: Sequence[Any]) -> list[Any]:
        """Return the operations that run instead."""
        return [
            *(self._targets.get(c_api.TF_OperationName(target), target) for target in targets),
            *self._extra_targets,
        ]

    def feeds(self, feeds: Mapping[Any, Any], number: int | None) -> dict[Any, Any]:
        """Return values for the copy's placeholders, and for the user's, which uncopied nodes may read."""
        values = dict(feeds)
        for output, value in feeds.items():
            placeholder = self._feeds.get(endpoint_of(output))
            if placeholder is not None:
                values[placeholder] = value
        if self.number is not None and number is not None:
            values[self.number] = np.asarray(number, np.int64)
        return values

    def all_feeds(self, feeds: Sequence[Any]) -> list[Any]:
        """Return all outputs that are fed."""
        return list(self.feeds(dict.fromkeys(feeds), 0))

    def tensor_name(self, name: str) -> str:
        """Return the name of the tensor that is fetched instead of the tensor of this name."""
        op, _, index = name.partition(":")
        hidden_endpoint = self._names.get((op, int(index or 0)))
        return name if hidden_endpoint is None else f"{self.prefix}{hidden_endpoint[0]}:{hidden_endpoint[1]}"

    def target_names(self, names: Iterable[str]) -> list[str]:
        """Return the names of the operations that run instead."""
        hidden_names = [
            self.prefix + self._target_names[name] if name in self._target_names else name for name in names
        ]
        return [*hidden_names, *(self.prefix + name for name in self._extra_names)]
