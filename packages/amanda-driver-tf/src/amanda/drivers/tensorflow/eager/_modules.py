"""Calls of modules and layers are regions of the program."""

import sys
import types
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any
from weakref import WeakSet

import tensorflow as tf
from amanda.backend import Attributes, digest
from amanda.interceptor import Enclosure

from .._layers import LAYERS, name_within


class Modules:
    """Encloses calls while the driver is attached."""

    def __init__(self) -> None:
        self._attributes = Attributes()

    def enter(self) -> None:
        """Make each call of a module or layer a region: the ops in it belong to that object."""
        for module, name in LAYERS:
            self._attributes.when_imported(module, partial(self._enclose_layer, module, name))
        for kind in _callable_modules(tf.Module):
            self._attributes.set(kind, "__call__", _enclosed(vars(kind)["__call__"]))

        def enclosed(kind: Any, /, **kwargs: Any) -> None:
            super(tf.Module, kind).__init_subclass__(**kwargs)
            if isinstance(vars(kind).get("__call__"), types.FunctionType):
                self._attributes.set(kind, "__call__", _enclosed(vars(kind)["__call__"]))

        self._attributes.set(tf.Module, "__init_subclass__", classmethod(enclosed))

    def leave(self) -> None:
        """Give the classes their own calls back."""
        self._attributes.restore()

    def _enclose_layer(self, module: str, name: str) -> None:
        kind = getattr(sys.modules[module], name, None)
        if kind is not None and not isinstance(vars(kind)["__call__"], Enclosure):
            self._attributes.set(kind, "__call__", Enclosure(vars(kind)["__call__"], place_within))


def _enclosed(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a `tf.Module` as a region, which AutoGraph converts as it does without.

    What it cannot convert it would run as it is, and remember that of the module for ever: so it is given a
    function, and the call itself within the region.
    """
    autograph = tf.__internal__.autograph

    def converted(*args: Any, **kwargs: Any) -> Any:
        context = autograph.control_status_ctx()
        converts = context.status.name == "ENABLED"
        return (autograph.tf_convert(call, context) if converts else call)(*args, **kwargs)

    enclosure = Enclosure(converted, place_within)

    @wraps(call)
    def enclosed(*args: Any, **kwargs: Any) -> Any:
        return enclosure(*args, **kwargs)

    return enclosed


def place_within(outer: Any, inner: Any) -> tuple[int, bool]:
    """Hash of an object's path in the one that calls it; one made for this call lies there by its type."""
    name = name_within(outer, inner)
    return digest(name), not name.startswith("(")


def _callable_modules(root: type) -> Iterator[type]:
    """Classes below one with a call of their own; those of tf_keras are enclosed at their root."""
    waiting: list[type] = [root]
    one: type
    while waiting:
        for one in type.__subclasses__(waiting.pop()):
            if one not in _not_modules:
                if one.__module__.startswith(("keras.", "tf_keras.")):
                    _not_modules.add(one)
                    continue
                waiting.append(one)
                if isinstance(vars(one).get("__call__"), types.FunctionType):
                    yield one


_not_modules: WeakSet[type] = WeakSet()
