"""What training leaves behind, as plain values that can be compared between runs."""

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

Facts = dict[str, Any]
FRAMEWORKS = ("tensorflow", "keras", "tf_keras")


def differences(before: Facts, after: Facts) -> list[str]:
    """Names of what is different in two observations."""
    return [name for name in {**before, **after} if name not in before or before[name] != after.get(name)]


def distances(expected: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, float]:
    """The largest difference of each array from another run's, over the largest magnitude in it.

    That counts as 0.001 at least: some gradients are zero but for rounding.
    """
    return {
        name: float(np.max(np.abs(value - arrays[name]), initial=0) / np.max(np.abs(value), initial=1e-3))
        for name, value in expected.items()
        if np.issubdtype(value.dtype, np.floating)
    }


def seed() -> None:
    """Set every random state that a model may use, also those that kernels hold."""
    tf.keras.utils.set_random_seed(0)


def array_facts(values: Mapping[str, Any]) -> Facts:
    """Dtype, shape and a digest of the elements of arrays, which tells every NaN and zero from the others."""
    return {name: (str(value.dtype), value.shape, digest(value)) for name, value in values.items()}


def digest(value: Any) -> str:
    """Of an array's bytes."""
    return hashlib.sha1(np.ascontiguousarray(value).tobytes(), usedforsecurity=False).hexdigest()


def random_states() -> Facts:
    """Of Python, numpy and eager TensorFlow."""
    return {
        "Python's random state": random.getstate(),
        "numpy's random state": repr(np.random.get_state()),
        "the next eager draw": digest(tf.random.uniform([4]).numpy()),
    }


def graph_facts(graph: Any) -> Facts:
    """Names, types, devices, inputs and attributes of every op of a graph, its functions and collections.

    TensorFlow has the functions in no order of theirs.
    """
    definition = graph.as_graph_def()
    definition.library.function.sort(key=lambda function: function.signature.name)
    return {
        "operations": [(op.name, op.type) for op in graph.get_operations()],
        "graph": hashlib.sha1(definition.SerializeToString(deterministic=True)).hexdigest(),
        "graph version": graph.version,
        "collections": {name: len(graph.get_collection(name)) for name in graph.get_all_collection_keys()},
    }


def layer_facts(model: Any) -> Facts:
    """Layers of a model with their attributes' names and the functions that they call."""
    layers = [model, *model._flatten_layers(include_self=False)]
    return {
        "layers": [(type(layer).__name__, layer.name) for layer in layers],
        "attributes of layers": [sorted(vars(layer)) for layer in layers],
        "weights": [(weight.name, tuple(weight.shape), str(weight.dtype)) for weight in model.weights],
    }


def attributes() -> dict[tuple[str, str], Any]:
    """Every function and class that the frameworks' modules and classes have, by where it is found."""
    values: dict[tuple[str, str], Any] = {}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and module.__name__.partition(".")[0] in FRAMEWORKS:
            for name, value in list(vars(module).items()):
                if callable(value):
                    values[module.__name__, name] = value
                if isinstance(value, type) and value.__module__.partition(".")[0] in FRAMEWORKS:
                    values |= dict(_of_class(value))
    return values


def replaced(before: Mapping[tuple[str, str], Any]) -> list[str]:
    """Names of attributes that are not what they were, and of those that known classes have more."""
    now = attributes()
    classes = {(place, name.rpartition(".")[0]) for place, name in before}
    changed = [key for key, value in before.items() if now.get(key) is not value]
    more = [
        (place, name)
        for place, name in now.keys() - before.keys()
        if (place, name.rpartition(".")[0]) in classes and "." in name
    ]
    return [f"{place}: {name}" for place, name in (*changed, *more)]


def _of_class(cls: type) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, value in list(vars(cls).items()):
        if callable(value) or isinstance(value, (property, classmethod, staticmethod)):
            yield (cls.__module__, f"{cls.__qualname__}.{name}"), value
