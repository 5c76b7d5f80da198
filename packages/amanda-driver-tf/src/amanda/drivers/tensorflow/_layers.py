"""Layers and modules: their paths in the object that is called first, and their names."""

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

LAYERS = (("keras.src.layers.layer", "Layer"), ("tf_keras.src.engine.base_layer", "Layer"))


def kinds_of_layers() -> tuple[type, ...]:
    """Return the base classes of layers of the versions of Keras that are imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in LAYERS)
    return tuple(kind for kind in found if kind is not None)


def is_of_keras_3(layer: Any) -> bool:
    """Return whether a layer is one of Keras 3, not of tf_keras."""
    module, name = LAYERS[0]
    return isinstance(layer, getattr(sys.modules.get(module), name, ()))


def handles_of(layer: Any) -> list[Any]:
    """Return the handles of a layer's variables."""
    variables = (getattr(one, "_value", one) for one in layer.weights)
    return [one.handle for one in variables if hasattr(one, "handle")]


def named_paths(subjects: Sequence[Any]) -> tuple[str, ...]:
    """Return the path of the innermost of some layers by their names, and the ends of that path.

    "model/block/dense", "block/dense" and "dense".
    """
    kinds: Any = kinds_of_layers()
    layers = {id(one): str(one.name) for one in subjects if isinstance(one, kinds)}
    return ends_of(list(layers.values()))


def ends_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return the path of these names, and the paths that it ends with."""
    return tuple("/".join(names[i:]) for i in range(len(names)))


def module_path(subjects: Sequence[Any]) -> str:
    """Path of the last object from the first: "layer1.conv"."""
    parts = [name_within(outer, inner) for outer, inner in pairwise(subjects) if inner is not outer]
    return ".".join(part for part in parts if part)


def name_within(outer: Any, inner: Any) -> str:
    """Attributes that lead from an object to another, or a layer's name where none do."""
    if inner is outer:
        return ""
    try:
        known = _names.get(outer)
        if known is None:
            known = _names[outer] = WeakKeyDictionary()
        if inner not in known:
            known[inner] = _found_within(outer, inner)
        return known[inner]
    except TypeError:  # an object that has no hash
        return _found_within(outer, inner)


def _found_within(outer: Any, inner: Any) -> str:
    waiting: list[tuple[str, Any]] = [("", outer)]
    seen: set[int] = {id(outer)}
    while waiting:
        path, holder = waiting.pop(0)
        for name, value in _parts(holder):
            if id(value) in seen:
                continue
            seen.add(id(value))
            here = f"{path}.{name}" if path else name
            if value is inner:
                return here
            waiting.append((here, value))
    layers = getattr(outer, "layers", None)
    if isinstance(layers, list) and any(one is inner for one in layers):
        return str(inner.name)
    private = (name for name, value in getattr(outer, "__dict__", {}).items() if value is inner)
    return next(private, f"({type(inner).__name__})")  # as Keras' attention holds its projections


def _parts(holder: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if name.startswith("_"):
            continue
        if _is_module(value):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", one) for i, one in enumerate(value) if _is_module(one))
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", one) for key, one in value.items() if _is_module(one))


def _is_module(value: Any) -> bool:
    return isinstance(value, (tf.Module, *kinds_of_layers()))


_names: WeakKeyDictionary[Any, WeakKeyDictionary[Any, str]] = WeakKeyDictionary()
"""By the object that is called first: paths of those that it calls."""
