"""The layer around each operation of a graph, inferred from the name scopes that Keras opens.

TensorFlow makes names of scopes unique: "dense_1" may be the layer of that name, or a call of the layer
"dense". The names of the layers decide, and the variables that are read in the scope.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import ops

from .._layers import handles_of, is_of_keras_3, layer_classes, layer_name_paths, module_path, path_suffixes

_NUMBER_SUFFIX = re.compile(r"_\d+$")
_ARGUMENT_OPS = ("Const", "ReadVariableOp")
_LAYER_FILES = ("/keras/src/layers/layer.py", "/tf_keras/src/engine/base_layer.py")

LayersByName = Mapping[str, Sequence[Any]]
"""Layers by name, those in fewer other layers first."""


class Location(NamedTuple):
    """The layer around an operation: its path, its other paths, and the layers from the outermost in."""

    scope: str
    aliases: Sequence[str] = ()
    enclosing_layers: Sequence[Any] = ()

    @classmethod
    def outside(cls, op: tf.Operation) -> Location:
        """Return the name scope of an operation that is in no layer.

        The scopes that functions such as `tf.add` open to convert their arguments are left out.
        """
        scope = op.name.rpartition("/")[0]
        if op.type in _ARGUMENT_OPS:
            users = [user.name for tensor in op.outputs for user in tensor.consumers()]
            if users and not any(name.startswith(f"{scope}/") for name in users):
                scope = scope.rpartition("/")[0]
        return cls(scope)


class NamedLayer:
    """A layer of a loaded graph, known from the names and handles of its variables alone."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.handles: set[Any] = set()
        self.layers: dict[str, NamedLayer] = {}

    def inner_layers(self) -> Iterator[NamedLayer]:
        """Yield the layers in this layer, those directly in it first."""
        yield from self.layers.values()
        for layer in self.layers.values():
            yield from layer.inner_layers()


class LayerIndex:
    """The layers among which name scopes are looked up during a rewrite."""

    def __init__(self) -> None:
        self._root = NamedLayer("")
        self._layer_and_inner_layers_by_id: dict[int, tuple[Any, LayersByName]] = {}

    def add_layers_named_in(self, variables: Iterable[Any]) -> None:
        """Add the layers in the names of a graph's variables, for graphs without living layers."""
        for variable in variables:
            layer = self._root
            for name in variable.name.split("/")[:-1]:
                layer = layer.layers.setdefault(name, NamedLayer(name))
                layer.handles.add(_handle_key(variable.handle))

    @cached_property
    def by_variable_names(self) -> LayersByName:
        """The layers in the names of the variables that were added before the first look-up."""
        return _index_layers(self._root.inner_layers())

    @cached_property
    def in_process(self) -> LayersByName:
        """All layers of the process, found by one search of all objects at the first look-up."""
        base_classes = layer_classes()
        is_layer_class: dict[type, bool] = {}
        layers = []
        # Keras has no list of its layers.
        for candidate in gc.get_objects():
            candidate_class = type(candidate)
            if candidate_class not in is_layer_class:
                is_layer_class[candidate_class] = issubclass(candidate_class, base_classes)
            # A layer whose constructor is running may have no name yet.
            if is_layer_class[candidate_class] and hasattr(candidate, "name"):
                layers.append(candidate)
        return _index_layers(reversed(layers))

    def inner_layers(self, layer: Any) -> LayersByName:
        """Return the layers in a layer by name; cached."""
        if id(layer) not in self._layer_and_inner_layers_by_id:
            # The entry holds the layer, so that no other object gets its id.
            self._layer_and_inner_layers_by_id[id(layer)] = layer, _index_layers(_nested_layers(layer))
        _, inner_layers = self._layer_and_inner_layers_by_id[id(layer)]
        return inner_layers


class Locations:
    """The layers around the operations of a graph.

    variable_of: returns the holder of the variable that a symbol was read from.
    enclosing_layers: the layers around the call of the graph.
    """

    def __init__(
        self,
        layer_index: LayerIndex,
        graph: Any,
        variable_of: Callable[[Any], Any],
        enclosing_layers: Sequence[Any] = (),
    ) -> None:
        self._layer_index = layer_index
        self._graph = graph
        self._variable_of = variable_of
        self._enclosing_layers = tuple(enclosing_layers)
        self._location_by_name_scope: dict[str, Location | None] = {}

    def __call__(self, op: tf.Operation) -> Location:
        """Return the location of an operation of the graph; operations of a name scope have equal layers."""
        name_scope = op.name.rpartition("/")[0]
        if name_scope not in self._location_by_name_scope:
            self._location_by_name_scope[name_scope] = self._locate(op, name_scope)
        return self._location_by_name_scope[name_scope] or Location.outside(op)

    def _locate(self, op: tf.Operation, name_scope: str) -> Location | None:
        """Find the layers around an operation: the function's, then those in its name scope; None outside."""
        layers = list(self._enclosing_layers)
        inner_layers = self._layer_index.inner_layers(layers[-1]) if layers else self._outermost_layers(op)
        scope = ""
        for part in name_scope.split("/") if inner_layers else ():
            scope = f"{scope}/{part}" if scope else part
            # A part may be no layer's: functions and users open scopes, too.
            layer = self._select_layer(_layer_candidates(part, inner_layers), scope)
            if layer is not None:
                layers.append(layer)
                inner_layers = self._layer_index.inner_layers(layer)
        if not layers:
            return None
        if isinstance(layers[-1], NamedLayer):
            names = [named_layer.name for named_layer in layers]
            path_in_model = ".".join(names[1:])
            return Location(path_in_model or names[0], path_suffixes(names), layers)
        return Location(module_path(layers), layer_name_paths(layers), layers)

    def _outermost_layers(self, op: tf.Operation) -> LayersByName:
        """Return the layers that may be around an operation: none if its traceback contains no layer."""
        frames = op.traceback
        if frames is None:  # of a graph that was loaded
            return self._layer_index.by_variable_names
        # An operation of a layer was created below Keras' code that calls layers.
        is_in_layer = any(frame.filename.endswith(_LAYER_FILES) for frame in frames)
        return self._layer_index.in_process if is_in_layer else {}

    def _select_layer(self, candidates: Sequence[Any], scope: str) -> Any:
        """Return the candidate whose variables are read in a scope, or else the first, or None."""
        if len(candidates) > 1:
            variables_read = self._variables_read_in(scope)
            for layer in candidates:
                if not variables_read.isdisjoint(_variable_keys(layer)):
                    return layer
        return candidates[0] if candidates else None

    def _variables_read_in(self, scope: str) -> set[Any]:
        """Return the keys of the variables that the graph reads within a name scope."""
        return {
            _handle_key(holder)
            for read_scope, holder in self._scopes_and_variables
            if read_scope == scope or read_scope.startswith(f"{scope}/")
        }

    @cached_property
    def _scopes_and_variables(self) -> list[tuple[str, Any]]:
        """The variables that the graph reads, each with the name scope of the read."""
        reads = []
        for op in self._graph.get_operations():
            scope = op.name.rpartition("/")[0]
            for tensor in op.inputs:
                # Handles, and references to variables of version 1.
                holder = self._variable_of(tensor) if tensor.dtype in (tf.resource, "float32_ref") else None
                if holder is not None:
                    reads.append((scope, holder))
        return reads


def _layer_candidates(part: str, layers_by_name: LayersByName) -> Sequence[Any]:
    """Return the layers that a part of a name scope may be a call of, the likelier ones first."""
    # Keras 3 enters the scope of a layer twice, at first to build the layer, so the scope of a call has a
    # number.
    name = _NUMBER_SUFFIX.sub("", part)
    layers_without_number = layers_by_name.get(name, ()) if name != part else ()
    entered_twice = [layer for layer in layers_without_number if is_of_keras_3(layer)]
    return entered_twice or [*layers_by_name.get(part, ()), *layers_without_number]


def _index_layers(layers: Iterable[Any]) -> LayersByName:
    """Return layers by name, without models within a Sequential of the same name."""
    layers_by_name: dict[str, list[Any]] = {}
    for layer in layers:
        layers_by_name.setdefault(str(layer.name), []).append(layer)
    # A Sequential contains a functional model of the same name, which is not a layer of the user's.
    for name, group in layers_by_name.items():
        inner_models = [id(vars(layer).get("_functional")) for layer in group]
        layers_by_name[name] = [layer for layer in group if id(layer) not in inner_models]
    return layers_by_name


def _nested_layers(layer: Any) -> Iterator[Any]:
    """Yield the layers in a layer, those directly in it first."""
    if isinstance(layer, NamedLayer):
        yield from layer.inner_layers()
        return
    direct_layers = list(layer._flatten_layers(include_self=False, recursive=False))
    yield from direct_layers
    direct_ids = {id(inner) for inner in direct_layers}
    yield from (inner for inner in layer._flatten_layers(include_self=False) if id(inner) not in direct_ids)


def _variable_keys(layer: Any) -> set[Any]:
    """Return the keys of the variables of a layer; see `_handle_key`."""
    if isinstance(layer, NamedLayer):
        return layer.handles
    return {_handle_key(handle) for handle in handles_of(layer)}


def _handle_key(handle: Any) -> Any:
    """Return the id of an eager handle, or the name of the operation that makes a symbolic one."""
    return handle._id if isinstance(handle, ops.EagerTensor) else handle.op.name
