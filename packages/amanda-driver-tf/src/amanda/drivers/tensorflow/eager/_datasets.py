"""Functions of datasets, which native code runs: that is reported, once for all datasets."""

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


REPORTED = (
    "the functions of datasets (tf.data)",
    "TensorFlow's native code runs what they map, filter and generate by as it is",
)


class Datasets:
    """Stands where a dataset is iterated over from Python; what is built in a scope is told there."""

    def __init__(self) -> None:
        self._since = 0
        self._found: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

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
            if activation is not None and self._is_earlier(iterator):
                activation.state.report(*REPORTED)
            return result

        return method

    def _is_earlier(self, iterator: Any) -> bool:
        """Return whether a dataset with functions was built before the scope."""
        if iterator not in self._found:
            found, waiting = False, [getattr(iterator, "_dataset", None)]
            while waiting:
                dataset = waiting.pop()
                if dataset is None:
                    continue
                waiting += dataset._inputs()
                built = dataset._variant_tensor
                found |= bool(
                    dataset._functions() and isinstance(built, EagerTensor) and built._id < self._since
                )
            self._found[iterator] = found
        return self._found[iterator]
