"""Functions of datasets run in native code, out of reach; the scope's report says so once."""

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
    """Reports iteration in a scope over datasets that were built before it; those built in it are ops."""

    def __init__(self) -> None:
        self._first_new_uid = 0
        self._earlier_iterators: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def patch(self, attributes: Attributes) -> None:
        """Patch the iterators of datasets until `attributes` are restored."""
        self._first_new_uid = ops.uid()
        self._earlier_iterators.clear()
        for name in ("_create_iterator", "_next_internal"):
            attributes.set(iterator_ops.OwnedIterator, name, self._stand_in_for(name))

    def _stand_in_for(self, name: str) -> Any:
        """Stand-in for a method of OwnedIterator: reports the functions of earlier datasets."""
        original = getattr(iterator_ops.OwnedIterator, name)

        @functools.wraps(original)
        def method(iterator: Any, *args: Any) -> Any:
            result = original(iterator, *args)
            activation = interceptor.active()
            # A dataset that is built in a scope is reported when its op is called.
            if activation is not None and self._is_earlier(iterator):
                activation.state.report(*REPORTED)
            return result

        return method

    def _is_earlier(self, iterator: Any) -> bool:
        """Return whether a dataset with functions was built before the scope."""
        if iterator not in self._earlier_iterators:
            has_earlier_functions, datasets = False, [getattr(iterator, "_dataset", None)]
            while datasets:
                dataset = datasets.pop()
                if dataset is None:
                    continue
                datasets += dataset._inputs()
                variant = dataset._variant_tensor
                has_earlier_functions |= bool(
                    dataset._functions()
                    and isinstance(variant, EagerTensor)
                    and variant._id < self._first_new_uid
                )
            self._earlier_iterators[iterator] = has_earlier_functions
        return self._earlier_iterators[iterator]
