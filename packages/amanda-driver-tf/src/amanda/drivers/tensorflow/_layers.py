"""Layers and modules: their paths and names in the model, and their calls as regions of the program."""

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import tensorflow as tf
from amanda.backend import Patches, path_of_call, place_by_path, type_as_path
from amanda.interceptor import Enclosure

LAYERS = (("keras.src.layers.layer", "Layer"), ("tf_keras.src.engine.base_layer", "Layer"))


def layer_classes() -> tuple[type, ...]:
    """Return the base classes of layers of the versions of Keras that are imported."""
    classes = (getattr(sys.modules.get(module), name, None) for module, name in LAYERS)
    return tuple(layer_class for layer_class in classes if layer_class is not None)


def is_of_keras_3(layer: Any) -> bool:
    """Return True for a layer of Keras 3, False for one of tf_keras."""
    module, name = LAYERS[0]
    return isinstance(layer, getattr(sys.modules.get(module), name, ()))


def handles_of(layer: Any) -> list[Any]:
    """Return the handles of a layer's variables."""
    # A variable of Keras 3 wraps a tf.Variable; one of another backend has no handle.
    variables = (getattr(variable, "_value", variable) for variable in layer.weights)
    return [variable.handle for variable in variables if hasattr(variable, "handle")]


def layer_name_paths(subjects: Sequence[Any]) -> tuple[str, ...]:
    """Return the path of the innermost layer by the names of the layers around it, and each end of that path.

    subjects: from the outermost in.  Example: "model/block/dense", "block/dense" and "dense".
    """
    classes: Any = layer_classes()
    layers = {id(subject): str(subject.name) for subject in subjects if isinstance(subject, classes)}
    return path_suffixes(list(layers.values()))


def path_suffixes(names: Sequence[str]) -> tuple[str, ...]:
    """Return the path of these names, and each shorter path that it ends with."""
    return tuple("/".join(names[i:]) for i in range(len(names)))


def module_path(subjects: Sequence[Any]) -> str:
    """Return the path from the first object to the last: "layer1.conv"."""
    return path_of_call(subjects, attribute_path)


def attribute_path(outer: Any, inner: Any) -> str:
    """Return the attributes that lead from an object to another, or a layer's name where none do."""
    if inner is outer:
        return ""
    try:
        # The search visits all submodules, so its result is cached, weakly in both objects.
        paths = _attribute_paths.get(outer)
        if paths is None:
            paths = _attribute_paths[outer] = WeakKeyDictionary()
        if inner not in paths:
            paths[inner] = _search_attribute_path(outer, inner)
        return paths[inner]
    except TypeError:  # an object that has no hash
        return _search_attribute_path(outer, inner)


def _search_attribute_path(outer: Any, inner: Any) -> str:
    """Search breadth first for the attributes that lead to `inner`; "(Type)" where there are none."""
    queue: list[tuple[str, Any]] = [("", outer)]
    visited: set[int] = {id(outer)}
    while queue:
        path, holder = queue.pop(0)
        for name, value in _submodules(holder):
            if id(value) in visited:
                continue
            visited.add(id(value))
            value_path = f"{path}.{name}" if path else name
            if value is inner:
                return value_path
            queue.append((value_path, value))
    # The layers of a functional model are in no attribute.
    layers = getattr(outer, "layers", None)
    if isinstance(layers, list) and any(layer is inner for layer in layers):
        return str(inner.name)
    private_names = (name for name, value in getattr(outer, "__dict__", {}).items() if value is inner)
    # Keras' attention layers hold their projections in private attributes.
    return next(private_names, type_as_path(inner))


def _submodules(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules in public attributes, and in lists and dicts there, each with its path."""
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        # Paths consist of names that users see.
        if name.startswith("_"):
            continue
        if _is_module(value):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", element) for i, element in enumerate(value) if _is_module(element))
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", element) for key, element in value.items() if _is_module(element))


def _is_module(value: Any) -> bool:
    return isinstance(value, (tf.Module, *layer_classes()))


_PLACE = place_by_path(attribute_path)
_attribute_paths: WeakKeyDictionary[Any, WeakKeyDictionary[Any, str]] = WeakKeyDictionary()
"""By an outer object, the paths of the objects in it."""


def enclose_modules(patches: Patches) -> None:
    """Make each call of a module or layer a region; the path of the module enters the ids of its ops."""

    def enclose_layers(module: str, name: str) -> None:
        """Enclose the calls of the layers of a version of Keras, unless they are enclosed already."""
        kind = getattr(sys.modules[module], name, None)
        if kind is not None and not isinstance(vars(kind)["__call__"], Enclosure):
            patches.set(kind, "__call__", Enclosure(vars(kind)["__call__"], _PLACE))

    def enclose(kind: type) -> None:
        """Enclose the calls of a subclass of `tf.Module` that defines `__call__`."""
        if isinstance(vars(kind).get("__call__"), types.FunctionType):
            patches.set(kind, "__call__", _wrap_module_call(vars(kind)["__call__"]))

    for module, name in LAYERS:
        patches.when_imported(module, partial(enclose_layers, module, name))
    # tf.Module has no `__call__`, so each subclass that defines one is patched, now or when it is created.
    for kind in _modules_without_keras():
        enclose(kind)
    patches.on_new_subclass(tf.Module, enclose)


def _wrap_module_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a `tf.Module` as a region that AutoGraph converts as it converts the call itself."""
    # AutoGraph cannot convert an Enclosure: it would run the call unconverted, and do so for this module ever
    # after. So AutoGraph gets a function, which converts the call within the region.
    autograph = tf.__internal__.autograph

    def converted(*args: Any, **kwargs: Any) -> Any:
        context = autograph.control_status_ctx()
        converts = context.status.name == "ENABLED"
        return (autograph.tf_convert(call, context) if converts else call)(*args, **kwargs)

    enclosure = Enclosure(converted, _PLACE)

    @wraps(call)
    def enclosed(*args: Any, **kwargs: Any) -> Any:
        return enclosure(*args, **kwargs)

    return enclosed


def _modules_without_keras() -> Iterator[type]:
    """Yield the subclasses of `tf.Module`, without those of Keras, whose base class is enclosed."""
    bases: list[type] = [tf.Module]
    subclass: type
    while bases:
        for subclass in type.__subclasses__(bases.pop()):
            if subclass in _keras_classes:
                continue
            if subclass.__module__.startswith(("keras.", "tf_keras.")):
                # Cached, since Keras has hundreds of classes and each scope asks again.
                _keras_classes.add(subclass)
                continue
            bases.append(subclass)
            yield subclass


_keras_classes: WeakSet[type] = WeakSet()
