"""Follows the channels of a Keras model through a call of it in eager TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import amanda
from amanda.backend import TensorMap
from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._call import Call
from amanda.tools.prune.channels._keras_removal import layers_of, size_is_unknown
from amanda.tools.prune.channels._keras_rules import Value, first_of, rule_of
from amanda.tools.prune.channels._labels import Families, Family
from amanda.tools.prune.channels._rules import fresh, reduced, unknown
from amanda.tools.prune.channels._tracing import Tracing, tensors_in

if TYPE_CHECKING:
    from amanda.tools.prune.channels._keras import KerasModel


class KerasTracing(Tracing):
    """Follows channels from op to op, where tensors are objects."""

    def __init__(self, model: KerasModel) -> None:
        super().__init__()
        self._model = model
        self._known: TensorMap[Families] = TensorMap()
        self._names: TensorMap[str] = TensorMap()
        self._handles = model.handles()
        self._given: list[list[Any]] = []

    def follow(self, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call the model, and keep whole what it returns; return that."""
        with amanda.apply(self):
            self.result = self._model(*example, **named)
        labels = self.notes.labels
        for value in tensors_in(self.result):
            labels.leave(self._known.get(value) or (), "the model returns them")
        for layer in layers_of(self._model.now):
            why = size_is_unknown(layer)
            for weight in layer.weights if why else ():
                labels.leave(self.channels.get(weight.path, ()), why)
        labels.settle()
        return self.result

    def layer(self, name: str) -> str:
        """Return the path of the layer that has a weight."""
        return name.rpartition("/")[0]

    def _analyse(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        context.insert_before_op(self._before)
        context.insert_after_op(
            self._after, type=context.get_op_type(), word=context["type"], op_id=context.get_op_id(),
            attributes=dict(context.get_attrs()), module=context.get_scope(),
        )  # fmt: skip

    @amanda.observer
    def _before(self, *inputs: Any) -> None:
        self._given.append([self._valued(one) for one in inputs])

    @amanda.observer
    def _after(
        self,
        *outputs: Any,
        type: str,
        word: str,
        op_id: int,
        attributes: Mapping[str, Any],
        module: str,
    ) -> None:
        values = self._given.pop()
        made = leaves(outputs)
        if type == "ReadVariableOp":
            name = self._handles.get(values[0].tensor)
            if name is not None:
                self._names[made[0]] = name
                self._known[made[0]] = self._of_weight(name, made[0])
            return
        results = [self._valued(one) for one in made]
        read = leaves(values)
        rule, names, inputs = rule_of(type, attributes, values) if values else (fresh, [], [])
        moved = partial(_moved, type, attributes, values)
        # a mean is not over the channels that are kept: ops of a function have no keys of eager ones
        word = type if rule is reduced else "add" if type == "BiasAdd" else word
        call = Call(
            word, f"{word} of {module or 'the model'}", op_id, inputs, names, results, _families, moved,
            self.notes, _name,
        )  # fmt: skip
        if not any(one.families for one in read):
            found = fresh(call)
        else:
            found = rule(call) if results else unknown(call)
        for output, families in zip(made, found, strict=True):
            if families:
                self._known[output] = families
            if type in ("Cast", "Identity") and read[0].name is not None:
                self._names[output] = read[0].name
        if type != "Squeeze":  # Keras adds a bias of one channel without it, and so that it is no BiasAdd
            self.step(call, rule, module, module, [(one.families, one.shape) for one in read], found)

    def _of_weight(self, name: str, value: Any) -> Families:
        """Return the families of a weight, new ones at first."""
        found = self.channels.get(name)
        return self.fresh(name, tuple(value.shape)) if found is None else found

    def _valued(self, tensor: Any) -> Any:
        if isinstance(tensor, (list, tuple)):
            return [self._valued(one) for one in tensor]
        shape = tuple(getattr(tensor, "shape", ()))
        return Value(tensor, shape, self._known.get(tensor) or (), self._names.get(tensor))


def _families(value: Any) -> Families:
    return value.families if isinstance(value, Value) else ()


def _name(value: Any) -> str | None:
    return value.name if isinstance(value, Value) else None


def _moved(type: str, attributes: Mapping[str, Any], values: Sequence[Any], family: Family) -> list[Family]:
    """Return what an op makes of labels in the place of its tensor: an array for each output."""
    import tensorflow as tf

    compute, first = getattr(tf.raw_ops, type), first_of(type)
    labels = tf.constant(np.ascontiguousarray(np.broadcast_to(family, values[first].shape)))
    given = [labels if i == first else one.tensor for i, one in enumerate(values)]
    renamed = {**attributes, "axis": attributes.get("axis", attributes.get("squeeze_dims"))}
    names = list(signature(compute).parameters)  # inputs, and then attributes
    said = {name: renamed[name] for name in names[len(given) :] if renamed.get(name) is not None}
    made = compute(**dict(zip(names, given, strict=False)), **said)
    return [one.numpy() for one in leaves([made])]
