"""Keras layers and `tf.Module`s: their paths in the model, and patches that put the paths into op ids."""

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import tensorflow as tf
from amanda.backend import Patches, path_of_call, place_by_path, type_as_path
from amanda.interceptor import Enclosure

LAYER_CLASS_NAMES = (("keras.src.layers.layer", "Layer"), ("tf_keras.src.engine.base_layer", "Layer"))
"""Module and name of the base class of layers, by version of Keras."""


def layer_classes() -> tuple[type, ...]:
    """Return the base classes of layers of the versions of Keras that are imported."""
    classes = (getattr(sys.modules.get(module), name, None) for module, name in LAYER_CLASS_NAMES)
    return tuple(layer_class for layer_class in classes if layer_class is not None)


def is_of_keras_3(layer: Any) -> bool:
    """Return True for a layer of Keras 3, False for one of tf_keras and for other objects."""
    module, name = LAYER_CLASS_NAMES[0]
    return isinstance(layer, getattr(sys.modules.get(module), name, ()))


def handles_of(layer: Any) -> list[Any]:
    """Return the handles of a layer's variables; those of another backend of Keras have none."""
    # A variable of Keras 3 wraps a tf.Variable.
    variables = (getattr(variable, "_value", variable) for variable in layer.weights)
    return [variable.handle for variable in variables if hasattr(variable, "handle")]


def layer_name_paths(subjects: Sequence[Any]) -> tuple[str, ...]:
    """Return the path of the innermost layer by the names of the layers around it, and each end of that path.

    subjects: from the outermost in; those that are no layers are left out, and a layer counts once.
    Example: "model/block/dense", "block/dense" and "dense".
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
    """Return the attributes that lead from one object to another, "" for the object itself; cached.

    Without such attributes: a name, as `_search_attribute_path` returns it.
    """
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
    """Search breadth first for the public attributes that lead to `inner`.

    Without any: the name of a layer of a functional model, else a private attribute, else "(Type)".
    """
    pending: list[tuple[str, Any]] = [("", outer)]
    visited_ids: set[int] = {id(outer)}
    while pending:
        path, module = pending.pop(0)
        for name, submodule in _named_submodules(module):
            if id(submodule) in visited_ids:
                continue
            visited_ids.add(id(submodule))
            submodule_path = f"{path}.{name}" if path else name
            if submodule is inner:
                return submodule_path
            pending.append((submodule_path, submodule))
    # The layers of a functional model are in no attribute.
    layers = getattr(outer, "layers", None)
    if isinstance(layers, list) and any(layer is inner for layer in layers):
        return str(inner.name)
    # Keras' attention layers hold their projections in private attributes.
    private_names = (name for name, value in getattr(outer, "__dict__", {}).items() if value is inner)
    return next(private_names, type_as_path(inner))


def _named_submodules(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules in public attributes, and in lists and dicts there, each with its path."""
    for name, value in list(getattr(module, "__dict__", {}).items()):
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


_PLACE_BY_PATH = place_by_path(attribute_path)
_attribute_paths: WeakKeyDictionary[Any, WeakKeyDictionary[Any, str]] = WeakKeyDictionary()
"""By an outer object, the paths of the objects in it."""


def enclose_modules(patches: Patches) -> None:
    """Patch `__call__` of layers and modules: the ids of ops in a call contain the path of the module.

    Modules that are defined, and Keras if it is imported, while the patches last are patched then.
    """

    def enclose_layers(module: str, name: str) -> None:
        """Patch the base class of the layers of a version of Keras, unless it is patched already."""
        layer_class = getattr(sys.modules[module], name, None)
        if layer_class is not None and not isinstance(vars(layer_class)["__call__"], Enclosure):
            call = Enclosure(vars(layer_class)["__call__"], _PLACE_BY_PATH)
            patches.set(layer_class, "__call__", call)

    def enclose_module_class(module_class: type) -> None:
        """Patch a subclass of `tf.Module`, if it defines `__call__` itself, as a function."""
        call = vars(module_class).get("__call__")
        if isinstance(call, types.FunctionType):
            patches.set(module_class, "__call__", _wrap_module_call(call))

    for module, name in LAYER_CLASS_NAMES:
        patches.when_imported(module, partial(enclose_layers, module, name))
    # tf.Module has no `__call__`, so each subclass that defines one is patched, now or when it is created.
    for module_class in _module_classes_without_keras():
        enclose_module_class(module_class)
    patches.on_new_subclass(tf.Module, enclose_module_class)


def _wrap_module_call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in for `__call__` of a `tf.Module`: encloses the call, and lets AutoGraph convert it."""
    # AutoGraph cannot convert an Enclosure: it would run the call unconverted, and do so for this module ever
    # after. So AutoGraph gets a function, which converts the call within the region.
    autograph = tf.__internal__.autograph

    def call_converted(*args: Any, **kwargs: Any) -> Any:
        context = autograph.control_status_ctx()
        is_converting = context.status.name == "ENABLED"
        return (autograph.tf_convert(call, context) if is_converting else call)(*args, **kwargs)

    enclosure = Enclosure(call_converted, _PLACE_BY_PATH)

    @wraps(call)
    def enclosed(*args: Any, **kwargs: Any) -> Any:
        return enclosure(*args, **kwargs)

    return enclosed


def _module_classes_without_keras() -> Iterator[type]:
    """Yield all subclasses of `tf.Module`, each once, but Keras' classes and subclasses of these.

    The base class of Keras' layers is patched instead.
    """
    unvisited_classes: list[type] = [tf.Module]
    visited_classes: set[type] = set()
    subclass: type
    while unvisited_classes:
        for subclass in type.__subclasses__(unvisited_classes.pop()):
            # Each of several bases has the class among its subclasses.
            if subclass in _keras_classes or subclass in visited_classes:
                continue
            visited_classes.add(subclass)
            if subclass.__module__.startswith(("keras.", "tf_keras.")):
                # Cached, since Keras has hundreds of classes and each scope asks again.
                _keras_classes.add(subclass)
                continue
            unvisited_classes.append(subclass)
            yield subclass


_keras_classes: WeakSet[type] = WeakSet()
