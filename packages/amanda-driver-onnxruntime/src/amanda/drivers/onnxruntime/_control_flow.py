"""Nodes of control flow whose bodies call Python: Python runs their rounds and branches one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import NodeProto

from amanda.backend import Execution

from ._items import GraphItem, RoutineCall
from ._values import OnnxSymbol, as_array, bodies_of

if TYPE_CHECKING:
    from ._graph_runner import GraphRunner

# Scan of opset 8 has a batch axis and sequence lengths, which later versions dropped.
_RUNNABLE_SINCE = {"If": 1, "Loop": 1, "Scan": 9, "SequenceMap": 17}
"""Nodes that Python can run, with the first opset whose semantics are those of this module."""
LOOPS = ("Loop", "Scan", "SequenceMap")


def is_runnable(node: NodeProto, opset: int) -> bool:
    """Return True for a node of control flow that Python can run round by round."""
    return node.domain in ("", "ai.onnx") and opset >= _RUNNABLE_SINCE.get(node.op_type, opset + 1)


@dataclass
class ControlFlowBody:
    """The rewritten graph of a branch, or of the body of a loop.

    inputs: symbols of its inputs.  outputs: names of its outputs in the rewritten graph.
    declared: symbols of its outputs as the model declares them.  items: the rewritten graph, in order.
    symbol: returns the symbol of a value.  constants: its initializers.
    """

    inputs: Sequence[OnnxSymbol]
    outputs: Sequence[str]
    declared: Sequence[OnnxSymbol]
    items: Sequence[GraphItem]
    symbol: Callable[[str], OnnxSymbol]
    constants: Mapping[str, Any]

    @property
    def calls_python(self) -> bool:
        """True if a routine in the body, or in a body within, runs as Python."""
        return any(isinstance(item, (RoutineCall, ControlFlowNode)) for item in self.items)

    def captured_names(self) -> Iterable[str]:
        """Yield the names of the values of graphs around that the body reads."""
        inner_names = {symbol.name for symbol in self.inputs} | self.constants.keys()
        for item in self.items:
            yield from (name for name in item.all_reads() if name not in inner_names)
            # Until an item has computed a name, it is that of a value of a graph around.
            inner_names.update(item.all_outputs())
        yield from (name for name in self.outputs if name not in inner_names)


@dataclass
class ControlFlowNode:
    """A node of control flow that Python runs.

    node: the node with rewritten inputs.  bodies: by the name of their attribute.
    waits_for: as of a `RoutineCall`; the node waits for nothing but what it reads.
    """

    node: NodeProto
    bodies: Mapping[str, ControlFlowBody]
    waits_for: tuple[str, ...] = ()

    @property
    def reads(self) -> list[str]:
        """Names of the values that the node reads, also in its bodies."""
        captured = (name for body in self.bodies.values() for name in body.captured_names())
        return list(dict.fromkeys((*filter(None, self.node.input), *captured)))

    @property
    def outputs(self) -> list[str]:
        """Names of the values that the node computes."""
        return [name for name in self.node.output if name]

    def all_reads(self) -> Iterable[str]:
        """Return the names of all values that the item reads, in its bodies too."""
        return self.reads

    def all_outputs(self) -> Iterable[str]:
        """Return the names of all values that the item computes."""
        return self.outputs


RunBody = Callable[[Sequence[Any], Sequence[int]], "list[Any]"]
"""Runs a body on its inputs, in a round of each loop around it; returns its outputs."""


class RunnableControlFlow:
    """A node of control flow, with the runners of its bodies."""

    def __init__(self, flow: ControlFlowNode, make_runner: Callable[[ControlFlowBody], GraphRunner]) -> None:
        self._flow = flow
        self.outputs = flow.outputs
        self.reads = flow.reads
        self._body_runners = {name: make_runner(body) for name, body in flow.bodies.items()}
        self._attributes = {
            attribute.name: onnx.helper.get_attribute_value(attribute)
            for attribute in flow.node.attribute
            if attribute.name not in flow.bodies
        }
        self._run = _RUNNERS[flow.node.op_type]

    def run(
        self, execution: Execution, values: Mapping[str, Any], options: Any, rounds: Sequence[int]
    ) -> list[Any]:
        """Run the node; return its outputs that have a name.  values: of the graphs around, by name."""
        inputs = [as_array(values[name]) if name else None for name in self._flow.node.input]
        outer_values = {name: values[name] for name in self.reads if name in values}

        def run_body_of(name: str) -> RunBody:
            """Return a function that runs a body on its inputs and on the values of graphs around."""
            body, runner = self._flow.bodies[name], self._body_runners[name]

            def run_body(body_inputs: Sequence[Any], round_of_node: Sequence[int]) -> list[Any]:
                """Run the body once, in this round if the node is a loop; return the body's outputs."""
                body_values = dict(outer_values)
                for symbol, value in zip(body.inputs, body_inputs, strict=True):
                    body_values[symbol.name] = value
                # The rounds of all loops around select the `run` of routines in the body.
                return runner.run(execution, body_values, body.outputs, options, (*rounds, *round_of_node))

            return run_body

        results = self._run(self._flow, self._attributes, run_body_of, inputs)
        return [value for name, value in zip(self._flow.node.output, results, strict=False) if name]


def _run_if(
    flow: ControlFlowNode,
    attributes: Mapping[str, Any],
    run_body_of: Callable[[str], RunBody],
    inputs: Sequence[Any],
) -> list[Any]:
    """Run the branch that the condition selects."""
    return run_body_of("then_branch" if np.all(inputs[0]) else "else_branch")((), ())


def _run_loop(
    flow: ControlFlowNode,
    attributes: Mapping[str, Any],
    run_body_of: Callable[[str], RunBody],
    inputs: Sequence[Any],
) -> list[Any]:
    """Run rounds while the condition holds, up to the limit; return carried values and stacked scans."""
    body, run_body = flow.bodies["body"], run_body_of("body")
    limit, condition, *carried_values = inputs  # the first two are None where they are left out
    # ONNX allows scalars and tensors with one element for both.
    limit_rounds = np.inf if limit is None else int(np.asarray(limit).reshape(()))
    goes_on = True if condition is None else bool(np.asarray(condition).reshape(()))
    # The session of the body refuses an input of another rank than the body declares.
    make_round_number, make_condition = (_scalar_maker(symbol) for symbol in body.inputs[:2])
    # The body returns the condition, the carried values, and the values of this round that are stacked.
    carried_count = len(carried_values)
    declared_scans = body.declared[1 + carried_count :]
    scans: list[list[Any]] = [[] for _ in declared_scans]
    round_number = 0
    while goes_on and round_number < limit_rounds:
        number, flag = make_round_number(round_number, np.int64), make_condition(goes_on, np.bool_)
        condition, *results = run_body([number, flag, *carried_values], (round_number,))
        carried_values, round_scans = results[:carried_count], results[carried_count:]
        for scan, value in zip(scans, round_scans, strict=True):
            scan.append(value)
        goes_on = bool(np.asarray(condition).reshape(()))
        round_number += 1
    stacked_scans = [
        _stack_rounds(scan, symbol, 0) for scan, symbol in zip(scans, declared_scans, strict=True)
    ]
    return [*carried_values, *stacked_scans]


def _run_scan(
    flow: ControlFlowNode,
    attributes: Mapping[str, Any],
    run_body_of: Callable[[str], RunBody],
    inputs: Sequence[Any],
) -> list[Any]:
    """Run a round for each slice of the scanned inputs; return the state and the stacked scan outputs."""
    body, run_body = flow.bodies["body"], run_body_of("body")
    scan_count = int(attributes["num_scan_inputs"])
    state, scanned_inputs = list(inputs[: len(inputs) - scan_count]), inputs[len(inputs) - scan_count :]
    declared_scans = body.declared[len(state) :]
    axes = attributes.get("scan_input_axes") or [0] * scan_count
    directions = attributes.get("scan_input_directions") or [0] * scan_count  # 1 scans from the last slice
    scans: list[list[Any]] = [[] for _ in declared_scans]
    length = scanned_inputs[0].shape[axes[0]]
    for round_number in range(length):
        positions = [length - 1 - round_number if is_reverse else round_number for is_reverse in directions]
        slices = [
            np.ascontiguousarray(np.take(value, position, axis))
            for value, position, axis in zip(scanned_inputs, positions, axes, strict=True)
        ]
        results = run_body([*state, *slices], (round_number,))
        state, round_scans = results[: len(state)], results[len(state) :]
        for scan, value in zip(scans, round_scans, strict=True):
            scan.append(value)
    output_axes = attributes.get("scan_output_axes") or [0] * len(scans)
    output_directions = attributes.get("scan_output_directions") or [0] * len(scans)
    for i, is_reverse in enumerate(output_directions):
        if is_reverse:
            scans[i].reverse()
    outputs = zip(scans, declared_scans, output_axes, strict=True)
    return [*state, *(_stack_rounds(scan, symbol, axis) for scan, symbol, axis in outputs)]


def _run_sequence_map(
    flow: ControlFlowNode,
    attributes: Mapping[str, Any],
    run_body_of: Callable[[str], RunBody],
    inputs: Sequence[Any],
) -> list[Any]:
    """Run a round for each element of the first sequence, with that of other sequences, and all tensors."""
    run_body = run_body_of("body")
    sequences: list[list[Any]] = [[] for _ in flow.node.output]
    for i in range(len(inputs[0])):
        body_inputs = [value[i] if isinstance(value, list) else value for value in inputs]
        for sequence, value in zip(sequences, run_body(body_inputs, (i,)), strict=True):
            sequence.append(value)
    return list(sequences)


# All have one signature, of which some read a part: Scan alone has attributes besides its body.
_RUNNERS = {"If": _run_if, "Loop": _run_loop, "Scan": _run_scan, "SequenceMap": _run_sequence_map}


def _scalar_maker(symbol: OnnxSymbol) -> Callable[[Any, Any], Any]:
    """Return a function that makes scalars of the rank that a body declares: 0, or 1 with extent 1."""
    shape = (1,) * (symbol.ndim or 0)
    return lambda value, dtype: np.full(shape, value, dtype)


def _stack_rounds(values: Sequence[Any], symbol: OnnxSymbol, axis: int) -> Any:
    """Stack the values of all rounds along a new axis; without rounds, unknown extents are 0.

    ONNX Runtime does so, too.  symbol: of such a value, as the body declares it.
    """
    if values:
        # A negative axis counts in the result, which has one axis more than the values.
        position = axis if axis >= 0 else axis + 1 + values[0].ndim
        return np.stack([np.asarray(value) for value in values], position)
    # Without a value the declared type alone tells shape and dtype.
    extents = [extent or 0 for extent in symbol.shape or ()]
    # The axis of the rounds has extent 0.
    extents.insert(axis if axis >= 0 else len(extents) + 1 + axis, 0)
    return np.zeros(extents, symbol.dtype or np.float32)


def nodes_within(nodes: Iterable[NodeProto]) -> Iterable[NodeProto]:
    """Yield the nodes of a graph, and those in their bodies."""
    for node in nodes:
        yield node
        for body in bodies_of(node):
            yield from nodes_within(body.node)
