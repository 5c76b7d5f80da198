"""The layer that each operation of a graph lies in, told by the name scopes that Keras opens.

TensorFlow makes names of scopes unique: "dense_1" may be the layer of that name, or a call of the layer
"dense". Which layers there are tells them apart, and the variables that are read in a scope.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.framework import ops

from .._layers import ends_of, handles_of, is_of_keras_3, kinds_of_layers, module_path, named_paths

_COUNTED = re.compile(r"_\d+$")
_GIVEN = ("Const", "ReadVariableOp")
_FILES = ("/keras/src/layers/layer.py", "/tf_keras/src/engine/base_layer.py")

Pool = Mapping[str, Sequence[Any]]
"""Layers by their names, those first that are nearer."""


class Location(NamedTuple):
    """The place of an operation: the path of its layer, other paths of that, and the layers themselves."""

    scope: str
    aliases: Sequence[str] = ()
    within: Sequence[Any] = ()

    @classmethod
    def outside(cls, op: tf.Operation) -> Location:
        """The name scope, for an operation that is in no layer.

        Functions such as `tf.add` open scopes to read and convert what they are given, which are left out.
        """
        scope = op.name.rpartition("/")[0]
        if op.type in _GIVEN:
            users = [user.name for tensor in op.outputs for user in tensor.consumers()]
            if users and not any(name.startswith(f"{scope}/") for name in users):
                scope = scope.rpartition("/")[0]
        return cls(scope)


class Named:
    """A layer of which no more is known than the names and handles of its variables."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.handles: set[Any] = set()
        self.layers: dict[str, Named] = {}

    def below(self) -> Iterator[Named]:
        """The layers in it, the nearer ones first."""
        yield from self.layers.values()
        for one in self.layers.values():
            yield from one.below()


class Layers:
    """The layers that scopes are looked up among, during one rewrite."""

    def __init__(self) -> None:
        self._root = Named("")
        self._below: dict[int, tuple[Any, Pool]] = {}

    def know(self, variables: Iterable[Any]) -> None:
        """Take the names of a graph's variables for layers where none are alive."""
        for variable in variables:
            one = self._root
            for name in variable.name.split("/")[:-1]:
                one = one.layers.setdefault(name, Named(name))
                one.handles.add(_key(variable.handle))

    @cached_property
    def named(self) -> Pool:
        """Return the layers of the variables' names."""
        return _pool(self._root.below())

    @cached_property
    def alive(self) -> Pool:
        """All that there are in this process."""
        kinds = kinds_of_layers()
        known: dict[type, bool] = {}
        found = []
        for one in gc.get_objects():
            kind = type(one)
            if kind not in known:
                known[kind] = issubclass(kind, kinds)
            if known[kind] and hasattr(one, "name"):  # it may be in the making
                found.append(one)
        return _pool(reversed(found))

    def below(self, layer: Any) -> Pool:
        """Return the layers in a layer."""
        if id(layer) not in self._below:
            self._below[id(layer)] = layer, _pool(_inner(layer))
        return self._below[id(layer)][1]


class Locations:
    """The layers that the operations of one graph lie in.

    variable_of: what holds the variable that a symbol was read of.
    within: the layers that the call of the graph lies in.
    """

    def __init__(
        self, layers: Layers, graph: Any, variable_of: Callable[[Any], Any], within: Sequence[Any] = ()
    ) -> None:
        self._layers = layers
        self._graph = graph
        self._variable_of = variable_of
        self._within = tuple(within)
        self._found: dict[str, Location | None] = {}

    def __call__(self, op: tf.Operation) -> Location:
        """The place of an operation of the graph."""
        directory = op.name.rpartition("/")[0]
        if directory not in self._found:
            self._found[directory] = self._place(op, directory)
        return self._found[directory] or Location.outside(op)

    def _place(self, op: tf.Operation, directory: str) -> Location | None:
        chain = list(self._within)
        pool = self._layers.below(chain[-1]) if chain else self._outermost(op)
        scope = ""
        for part in directory.split("/") if pool else ():
            scope = f"{scope}/{part}" if scope else part
            found = self._chosen(_candidates(part, pool), scope)
            if found is not None:
                chain.append(found)
                pool = self._layers.below(found)
        if not chain:
            return None
        if isinstance(chain[-1], Named):
            names = [one.name for one in chain]
            return Location(".".join(names[1:]) or names[0], ends_of(names), chain)
        return Location(module_path(chain), named_paths(chain), chain)

    def _outermost(self, op: tf.Operation) -> Pool:
        """Layers that an operation may lie in: none where TensorFlow knows that no layer made it."""
        frames = op.traceback
        if frames is None:  # of a graph that was loaded
            return self._layers.named
        made = any(frame.filename.endswith(_FILES) for frame in frames)
        return self._layers.alive if made else {}

    def _chosen(self, candidates: Sequence[Any], scope: str) -> Any:
        """The one whose variables are read in the scope; the first where that tells nothing."""
        if len(candidates) > 1:
            read = self._read_in(scope)
            candidates = [one for one in candidates if not read.isdisjoint(_handles(one))] or candidates
        return candidates[0] if candidates else None

    def _read_in(self, scope: str) -> set[Any]:
        return {
            _key(holder)
            for directory, holder in self._reads
            if directory == scope or directory.startswith(f"{scope}/")
        }

    @cached_property
    def _reads(self) -> list[tuple[str, Any]]:
        """The variables that are read, with the scopes where they are."""
        found = []
        for op in self._graph.get_operations():
            for tensor in op.inputs:
                holder = self._variable_of(tensor) if tensor.dtype in (tf.resource, "float32_ref") else None
                if holder is not None:
                    found.append((op.name.rpartition("/")[0], holder))
        return found


def _candidates(part: str, pool: Pool) -> Sequence[Any]:
    """The layers that a part of a name scope may be a call of, the likelier ones first.

    Keras 3 enters the scope of a layer twice, for what builds the layer first, so that the scope of each
    call is counted.
    """
    name = _COUNTED.sub("", part)
    counted = pool.get(name, ()) if name != part else ()
    twice = [one for one in counted if is_of_keras_3(one)]
    return twice or [*pool.get(part, ()), *counted]


def _pool(layers: Iterable[Any]) -> Pool:
    found: dict[str, list[Any]] = {}
    for one in layers:
        found.setdefault(str(one.name), []).append(one)
    for name, group in found.items():  # a Sequential has a model of its own name in it
        hidden = [id(vars(one).get("_functional")) for one in group]
        found[name] = [one for one in group if id(one) not in hidden]
    return found


def _inner(layer: Any) -> Iterator[Any]:
    """The layers in a layer, the nearer ones first."""
    if isinstance(layer, Named):
        yield from layer.below()
        return
    near = list(layer._flatten_layers(include_self=False, recursive=False))
    yield from near
    seen = {id(one) for one in near}
    yield from (one for one in layer._flatten_layers(include_self=False) if id(one) not in seen)


def _handles(layer: Any) -> set[Any]:
    if isinstance(layer, Named):
        return layer.handles
    return {_key(one) for one in handles_of(layer)}


def _key(handle: Any) -> Any:
    return handle._id if isinstance(handle, ops.EagerTensor) else handle.op.name
