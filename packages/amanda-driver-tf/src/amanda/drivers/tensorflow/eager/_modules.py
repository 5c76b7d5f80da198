"""Calls of modules and layers as regions of the program, to which the ops in them belong."""

import sys
import types
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import tensorflow as tf
from amanda.backend import Attributes, digest
from amanda.interceptor import Enclosure

from .._layers import LAYERS, attribute_path


class ModuleCalls:
    """Encloses calls of modules and layers while the driver is attached."""

    def __init__(self) -> None:
        self._attributes = Attributes()

    def patch(self) -> None:
        """Make each call of a module or layer a region."""
        for module, name in LAYERS:
            self._attributes.when_imported(module, partial(self._enclose_layer, module, name))
        # tf.Module has no `__call__`, so each subclass that defines one is patched, now or when it is
        # created.
        for kind in _callable_modules(tf.Module):
            self._attributes.set(kind, "__call__", _as_region(vars(kind)["__call__"]))

        def enclosed(kind: Any, /, **kwargs: Any) -> None:
            # The stand-in is no method of a class, so it names the class after which the search for a method
            # begins.
            super(tf.Module, kind).__init_subclass__(**kwargs)
            if isinstance(vars(kind).get("__call__"), types.FunctionType):
                self._attributes.set(kind, "__call__", _as_region(vars(kind)["__call__"]))

        self._attributes.set(tf.Module, "__init_subclass__", classmethod(enclosed))

    def restore(self) -> None:
        """Restore the `__call__` of the classes."""
        self._attributes.restore()

    def _enclose_layer(self, module: str, name: str) -> None:
        kind = getattr(sys.modules[module], name, None)
        if kind is not None and not isinstance(vars(kind)["__call__"], Enclosure):
            self._attributes.set(kind, "__call__", Enclosure(vars(kind)["__call__"], hash_attribute_path))


def _as_region(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a `tf.Module` as a region that AutoGraph converts as it converts the call itself."""
    # AutoGraph cannot convert an Enclosure: it would run the call unconverted, and do so for this module ever
    # after. So AutoGraph gets a function, which converts the call within the region.
    autograph = tf.__internal__.autograph

    def converted(*args: Any, **kwargs: Any) -> Any:
        context = autograph.control_status_ctx()
        converts = context.status.name == "ENABLED"
        return (autograph.tf_convert(call, context) if converts else call)(*args, **kwargs)

    enclosure = Enclosure(converted, hash_attribute_path)

    @wraps(call)
    def enclosed(*args: Any, **kwargs: Any) -> Any:
        return enclosure(*args, **kwargs)

    return enclosed


def hash_attribute_path(outer: Any, inner: Any) -> tuple[int, bool]:
    """Return the hash of `inner`'s path in `outer`, and whether attributes lead there.

    An object made for this call is on no attribute: its path is its type.
    """
    name = attribute_path(outer, inner)
    return digest(name), not name.startswith("(")


def _callable_modules(root: type) -> Iterator[type]:
    """Yield the subclasses that define `__call__`, without those of Keras, whose base class is enclosed."""
    bases: list[type] = [root]
    subclass: type
    while bases:
        for subclass in type.__subclasses__(bases.pop()):
            if subclass not in _not_modules:
                if subclass.__module__.startswith(("keras.", "tf_keras.")):
                    # Remembered, since Keras has hundreds of classes and each scope asks again.
                    _not_modules.add(subclass)
                    continue
                bases.append(subclass)
                if isinstance(vars(subclass).get("__call__"), types.FunctionType):
                    yield subclass


_not_modules: WeakSet[type] = WeakSet()
