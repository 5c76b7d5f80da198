"""Follows the channels of an ONNX model through a run of its session, where tensors have names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._call import Call
from amanda.tools.prune.channels._labels import Families, Family
from amanda.tools.prune.channels._onnx_rules import Value, moves, rule_of, unfollowed
from amanda.tools.prune.channels._rules import fresh, unknown
from amanda.tools.prune.channels._tracing import Tracing

if TYPE_CHECKING:
    from amanda.tools.prune.channels._onnx import OnnxModel


class OnnxTracing(Tracing):
    """Follows channels from node to node.

    numbers: arrays of integers that a node reads, by its key and the input's position.
    """

    def __init__(self, model: OnnxModel) -> None:
        super().__init__()
        self.numbers: dict[tuple[str, int], Any] = {}
        self._model, self._weights = model, model.tensors()
        self._known: dict[str, Families] = {}
        self._layers: dict[str, str] = {}
        self._given: dict[str, Sequence[Value | None]] = {}

    def follow(self, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run the model, and keep whole what it returns; return that."""
        try:
            with amanda.apply(self):
                self.result = self._model(*example, **named)
        except Exception:
            with self._model.as_far_as_it_runs(*example, **named), amanda.apply(self):
                self._model(*example, **named)
            raise
        labels = self.notes.labels
        for name in self._model.outputs:
            labels.leave(self._known.get(name, ()), "the model returns them")
        for name, reader in self._model.read_in_bodies.items():
            if name in self._known or name in self._weights:
                families = self._families(Value(name, self._weights.get(name)))
                labels.leave(families, f"channels are not followed into the bodies of {reader}")
                for family in families if name in self._weights else ():
                    labels.produce(family)
        labels.settle()
        return self.result

    def layer(self, name: str) -> str:
        """Return the path of the module, or else the name of the node, that first read a weight."""
        return self._layers.get(name, name)

    def _analyse(self, context: amanda.OpContext) -> None:
        key = self._model.key(context)
        if key not in self._model.nodes:  # of a body, where nothing can listen
            return
        symbols, made = context.get_inputs(), [name for name in context.get_op().node.output if name]
        names = tuple(_of_each(symbols, lambda one: None if one is None else (one.name, one.root)))
        context.insert_before_op(self._before, key=key, names=names)
        op = context.get_op()
        context.insert_after_op(
            self._after, key=key, made=tuple(made), word=context["type"], type=op.type,
            attributes=dict(context.get_attrs()), module=context.get_scope() or op.name, node=op.name,
            compute=context.get_computation() if moves(op.type) else None,
        )  # fmt: skip

    @amanda.observer
    def _before(self, *inputs: Any, key: str, names: Sequence[Any]) -> None:
        arrays = list(_of_each(inputs, lambda one: one if isinstance(one, np.ndarray) else None))
        self._given[key] = [
            None if name is None or array is None else Value(name[0], array, name[1])
            for name, array in zip(names, arrays, strict=True)
        ]

    @amanda.observer
    def _after(
        self,
        *outputs: Any,
        key: str,
        made: Sequence[str],
        word: str,
        type: str,
        attributes: Mapping[str, Any],
        module: str,
        node: str,
        compute: Callable[[Sequence[Any]], Any] | None,
    ) -> None:
        values = self._given.pop(key)
        arrays = (one for one in _of_each(outputs, lambda one: one) if isinstance(one, np.ndarray))
        results = [Value(name, one) for name, one in zip(made, arrays, strict=False)]
        channels = [() if one is None else self._families(one) for one in values]
        for i, value in enumerate(values):
            if value is not None and value.root is not None and value.root in self._weights:
                self._layers.setdefault(value.root, module)
            if value is not None and value.array.dtype in (np.int32, np.int64):
                self.numbers[key, i] = value.array
        why = unfollowed(type, values, channels)
        if why:
            self.unfollowed[node] = why
        found_rule, names, inputs = rule_of(type, attributes, values, len(results), self._model.opset)
        moved = partial(_moved, compute, values)
        call = Call(
            word, f"{type} {node}", key, inputs, names, results, self._families, moved, self.notes, self._name
        )
        rule = found_rule if any(channels) else fresh
        found = rule(call) if results else unknown(call)
        self._known.update(
            (one.name, families) for one, families in zip(results, found, strict=True) if families
        )
        read = [(own, one.shape) for own, one in zip(channels, values, strict=True) if one is not None]
        self.step(call, found_rule, module, node, read, found)

    def _families(self, value: Value) -> Families:
        """Return the families of a value; a weight has new ones at first."""
        found = self._known.get(value.name)
        if found is None and value.name in self._weights:
            found = self._known[value.name] = self.fresh(value.name, value.shape)
        return found or ()

    def _name(self, value: Any) -> str | None:
        return value.root if isinstance(value, Value) and value.root in self._weights else None


def _of_each(values: Sequence[Any], found: Callable[[Any], Any]) -> Sequence[Any]:
    """Return what a function gives of each value, of each of a list where several are one input."""
    return [found(one) for one in leaves(values)]


def _moved(
    compute: Callable[[Sequence[Any]], Any] | None, values: Sequence[Value | None], family: Family
) -> list[Family]:
    """Return what a node makes of labels in the place of its first input: an array for each output."""
    assert compute is not None
    assert values[0] is not None
    whole = np.ascontiguousarray(np.broadcast_to(family, values[0].shape))
    made = compute([whole, *(None if one is None else one.array for one in values[1:])])
    return leaves([made])
