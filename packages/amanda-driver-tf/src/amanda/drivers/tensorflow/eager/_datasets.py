"""Datasets that were built before the scope: native code runs their functions, which is reported."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.framework import ops
from tensorflow.python.framework.ops import EagerTensor

if TYPE_CHECKING:
    from amanda.backend import Attributes


class Datasets:
    """Stands where a dataset is iterated over from Python; what is built in a scope is told there."""

    def __init__(self) -> None:
        self._since = 0
        self._found: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()

    def enter(self, attributes: Attributes) -> None:
        """Take the places until `attributes` are restored."""
        self._since = ops.uid()
        self._found.clear()
        for name in ("_create_iterator", "_next_internal"):
            attributes.set(iterator_ops.OwnedIterator, name, self._told(name))

    def _told(self, name: str) -> Any:
        original = getattr(iterator_ops.OwnedIterator, name)

        @functools.wraps(original)
        def method(iterator: Any, *args: Any) -> Any:
            result = original(iterator, *args)
            activation = interceptor.active()
            if activation is not None:
                for kind in self._earlier(iterator):
                    activation.state.report(
                        f"the functions of {kind}",
                        "it was built before the scope, and TensorFlow's native code runs them as they are",
                    )
            return result

        return method

    def _earlier(self, iterator: Any) -> list[str]:
        """Kinds of the datasets with functions that were built before."""
        if iterator not in self._found:
            self._found[iterator] = found = []
            waiting = [getattr(iterator, "_dataset", None)]
            while waiting:
                dataset = waiting.pop()
                if dataset is None:
                    continue
                waiting += dataset._inputs()
                built = dataset._variant_tensor
                if dataset._functions() and isinstance(built, EagerTensor) and built._id < self._since:
                    found.append(type(dataset).__name__.lstrip("_"))
        return self._found[iterator]
