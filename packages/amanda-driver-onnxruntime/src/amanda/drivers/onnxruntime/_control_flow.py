"""Nodes of control flow whose bodies call Python: their rounds and branches run one after another here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import NodeProto

from amanda.backend import Execution

from ._names import bodies_of
from ._places import Call, Item
from ._symbols import Symbol
from ._values import as_array

if TYPE_CHECKING:
    from ._steps import Steps

_SINCE = {"If": 1, "Loop": 1, "Scan": 9, "SequenceMap": 17}
"""Nodes that Python can run, by the version since which they are as here."""
LOOPS = ("Loop", "Scan", "SequenceMap")


def is_runnable(node: NodeProto, opset: int) -> bool:
    """Return True for a node of control flow that Python can run round by round."""
    return node.domain in ("", "ai.onnx") and opset >= _SINCE.get(node.op_type, opset + 1)


@dataclass
class Body:
    """The rewritten graph of a body.

    inputs: its inputs, as Symbols.  outputs: names of what it gives, as they are read now.
    declared: its outputs as the model has them.  items: the graph, in order.  symbol: gives that of a value.
    constants: its initializers.
    """

    inputs: Sequence[Symbol]
    outputs: Sequence[str]
    declared: Sequence[Symbol]
    items: Sequence[Item]
    symbol: Callable[[str], Symbol]
    constants: Mapping[str, Any]

    @property
    def calls_python(self) -> bool:
        """Return True if a routine in it, or in a body within, runs as Python."""
        return any(isinstance(item, (Call, Flow)) for item in self.items)

    def captured(self) -> Iterable[str]:
        """Names of the values that it reads of the graphs around."""
        inner = {symbol.name for symbol in self.inputs} | self.constants.keys()
        for item in self.items:
            yield from (name for name in item.all_reads() if name not in inner)
            inner.update(item.makes())
        yield from (name for name in self.outputs if name not in inner)


@dataclass
class Flow:
    """A node of control flow that Python runs.

    node: with its inputs as they are read now.  bodies: by the name of their attribute.
    """

    node: NodeProto
    bodies: Mapping[str, Body]
    waits: tuple[str, ...] = ()

    @property
    def reads(self) -> list[str]:
        """Names of the values that it reads, in its bodies too."""
        captured = (name for body in self.bodies.values() for name in body.captured())
        return list(dict.fromkeys((*filter(None, self.node.input), *captured)))

    @property
    def gives(self) -> list[str]:
        """Names of the values that it gives."""
        return [name for name in self.node.output if name]

    def all_reads(self) -> Iterable[str]:
        """Names of the values that it reads."""
        return self.reads

    def makes(self) -> Iterable[str]:
        """Names of the values that it gives."""
        return self.gives


Run = Callable[[Sequence[Any], Sequence[int]], "list[Any]"]
"""Runs a body on its inputs, in a round of each loop around it; returns its outputs."""


class RunnableFlow:
    """A node of control flow, with the sessions of its bodies."""

    def __init__(self, flow: Flow, made: Callable[[Body], Steps]) -> None:
        self._flow = flow
        self.gives = flow.gives
        self.reads = flow.reads
        self._steps = {name: made(body) for name, body in flow.bodies.items()}
        self._attributes = {
            one.name: onnx.helper.get_attribute_value(one)
            for one in flow.node.attribute
            if one.name not in flow.bodies
        }
        self._run = _KINDS[flow.node.op_type]

    def run(
        self, execution: Execution, values: Mapping[str, Any], options: Any, rounds: Sequence[int]
    ) -> list[Any]:
        """Return what the node gives.  values: of the graphs around, by name."""
        inputs = [as_array(values[name]) if name else None for name in self._flow.node.input]
        outer = {name: values[name] for name in self.reads if name in values}

        def runner(name: str) -> Run:
            body, steps = self._flow.bodies[name], self._steps[name]

            def run(given: Sequence[Any], inner_rounds: Sequence[int]) -> list[Any]:
                named = {one.name: value for one, value in zip(body.inputs, given, strict=True)}
                present = {**outer, **named}
                return steps.run(execution, present, body.outputs, options, (*rounds, *inner_rounds))

            return run

        results = self._run(self._flow, self._attributes, runner, inputs)
        return [value for name, value in zip(self._flow.node.output, results, strict=False) if name]


def _if(
    flow: Flow, attributes: Mapping[str, Any], runner: Callable[[str], Run], inputs: Sequence[Any]
) -> list[Any]:
    return runner("then_branch" if np.all(inputs[0]) else "else_branch")((), ())


def _loop(
    flow: Flow, attributes: Mapping[str, Any], runner: Callable[[str], Run], inputs: Sequence[Any]
) -> list[Any]:
    """Run rounds while the condition holds, at most as many as told; stack what each round gives besides."""
    body, run = flow.bodies["body"], runner("body")
    limit, condition, *carried = (*inputs, None, None) if len(inputs) < 2 else inputs
    most = np.inf if limit is None else int(np.asarray(limit).reshape(()))
    going = True if condition is None else bool(np.asarray(condition).reshape(()))
    number, flag = (_scalar_of(symbol) for symbol in body.inputs[:2])
    rows: list[list[Any]] = [[] for _ in body.outputs[1 + len(carried) :]]
    i = 0
    while going and i < most:
        given = [number(i, np.int64), flag(going, np.bool_), *carried]
        condition, *results = run(given, (i,))
        carried, each = results[: len(carried)], results[len(carried) :]
        for row, value in zip(rows, each, strict=True):
            row.append(value)
        going = bool(np.asarray(condition).reshape(()))
        i += 1
    declared = body.declared[1 + len(carried) :]
    return [*carried, *(_stacked(row, symbol, 0) for row, symbol in zip(rows, declared, strict=True))]


def _scan(
    flow: Flow, attributes: Mapping[str, Any], runner: Callable[[str], Run], inputs: Sequence[Any]
) -> list[Any]:
    """Run a round for each slice of the scanned inputs; stack what each round gives besides its state."""
    body, run = flow.bodies["body"], runner("body")
    count = int(attributes["num_scan_inputs"])
    state, scanned = list(inputs[: len(inputs) - count]), inputs[len(inputs) - count :]
    declared = body.declared[len(state) :]
    axes = attributes.get("scan_input_axes") or [0] * count
    backwards = attributes.get("scan_input_directions") or [0] * count
    rows: list[list[Any]] = [[] for _ in declared]
    length = scanned[0].shape[axes[0]]
    for i in range(length):
        places = [length - 1 - i if back else i for back in backwards]
        slices = [
            np.ascontiguousarray(np.take(value, place, axis))
            for value, place, axis in zip(scanned, places, axes, strict=True)
        ]
        results = run([*state, *slices], (i,))
        state, each = results[: len(state)], results[len(state) :]
        for row, value in zip(rows, each, strict=True):
            row.append(value)
    out_axes = attributes.get("scan_output_axes") or [0] * len(rows)
    out_backwards = attributes.get("scan_output_directions") or [0] * len(rows)
    stacked = [
        _stacked(row[::-1] if back else row, symbol, axis)
        for row, symbol, axis, back in zip(rows, declared, out_axes, out_backwards, strict=True)
    ]
    return [*state, *stacked]


def _sequence_map(
    flow: Flow, attributes: Mapping[str, Any], runner: Callable[[str], Run], inputs: Sequence[Any]
) -> list[Any]:
    """Run a round for each value of a sequence; other sequences go along, tensors are given to each round."""
    run = runner("body")
    rows: list[list[Any]] = [[] for _ in flow.node.output]
    for i in range(len(inputs[0])):
        given = [value[i] if isinstance(value, list) else value for value in inputs]
        for row, value in zip(rows, run(given, (i,)), strict=True):
            row.append(value)
    return list(rows)


_KINDS = {"If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map}


def _scalar_of(symbol: Symbol) -> Callable[[Any, Any], Any]:
    """Return what makes a number of the rank that a body wants: none, or one axis of extent 1."""
    shape = (1,) * (symbol.ndim or 0)
    return lambda value, dtype: np.full(shape, value, dtype)


def _stacked(rows: Sequence[Any], symbol: Symbol, axis: int) -> Any:
    """Return values along a new axis; of no round as ONNX Runtime does, unknown extents are 0."""
    if rows:
        return np.stack([np.asarray(one) for one in rows], axis if axis >= 0 else axis + 1 + rows[0].ndim)
    extents = [extent or 0 for extent in symbol.shape or ()]
    extents.insert(axis if axis >= 0 else len(extents) + 1 + axis, 0)
    return np.zeros(extents, symbol.dtype or np.float32)


def nodes_within(nodes: Iterable[NodeProto]) -> Iterable[NodeProto]:
    """The nodes of a graph, and those in their bodies."""
    for node in nodes:
        yield node
        for body in bodies_of(node):
            yield from nodes_within(body.node)
