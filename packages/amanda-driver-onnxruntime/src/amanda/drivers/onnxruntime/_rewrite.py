"""The rewrite of a model: its nodes, those in bodies of control flow, and the routines among them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, ValueInfoProto

from amanda.backend import Insertion, NotTraceable, OpFacts, Rewriter, Rewriting, Side, Value, digest
from amanda.errors import RoutineError

from ._computation import Computation, computation_of, keeps_elements, rearrange_constant
from ._control_flow import LOOPS, ControlFlowBody, ControlFlowNode, is_runnable
from ._facts import facts_of, input_layout, output_layout
from ._items import ComputedNode, GraphItem, RoutineCall, TypedInsertion
from ._model import Model, array_of, constant_of, is_all_typed, types_in
from ._tracing import NodeRecorder, TracedArray
from ._values import Array, OnnxSymbol

# A model may have been instrumented before; the numbers of new names go on where the earlier ones end.
_AMANDA_NAME = re.compile(r"amanda/[a-z]+(\d+)")


@dataclass(kw_only=True)
class ModelRewriting(Rewriting):
    """The rewrite of a model.

    identity: 64 bits that name the model, the same in every process.
    items: the rewritten graph, in order.  constants: arrays that routines returned, by name.
    renamed: names that are read instead of values of the outermost graph.
    symbol: returns the symbol of a value of the outermost graph.
    last_number: the highest number in the names that rewrites have added.
    """

    model: Model
    identity: int
    items: list[GraphItem] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.last_number = _last_number(self.model.proto.graph)
        self.symbol: Callable[[str], OnnxSymbol] = self.model.symbol

    def run(self) -> None:
        """Analyse each node, and put the recorded actions among the nodes."""
        rewriter = OnnxRewriter(self.model.proto.graph, self, self.model.symbol)
        rewriter.run()
        self.items, self.renamed, self.symbol = rewriter.items, rewriter.current_refs, rewriter.symbol

    def new_name(self, kind: str) -> str:
        """Return a name that no value has."""
        self.last_number += 1
        return f"amanda/{kind}{self.last_number}"


class NamedNode(NamedTuple):
    """A node of a graph, and its name, or a generated name for a node without one."""

    proto: NodeProto
    name: str


class OnnxRewriter(Rewriter[NamedNode]):
    """The rewrite of a graph: the outermost graph, or a body of control flow.

    path: names of the nodes around the body.  symbol: returns the symbol of a value of the graph around.
    depth: number of loops around the body.  items: the rewritten graph, in order.
    `_copied_node`: the copy of the node that is being rewritten, set by `write_node`.
    """

    insertion_type = TypedInsertion
    rewriting: ModelRewriting

    def __init__(
        self,
        graph: GraphProto,
        rewriting: ModelRewriting,
        symbol: Callable[[str], OnnxSymbol],
        path: tuple[str, ...] = (),
        current_refs: dict[str, str] | None = None,
        calls_python: bool = True,
        depth: int = 0,
    ) -> None:
        super().__init__(rewriting, current_refs, calls_python=calls_python)
        self.graph = graph
        self.path = path
        self.depth = depth
        self.items: list[GraphItem] = []
        self._outer_symbol = symbol
        self._symbols: dict[str, OnnxSymbol] = {}
        if path:
            self._declare_body_values()

    def nodes(self) -> Iterator[NamedNode]:
        """Return the nodes in the order of the graph, which is topological."""
        return map(NamedNode, self.graph.node, _unique_names(self.graph.node))

    def symbol(self, name: str) -> OnnxSymbol:
        """Return the one symbol of a value of this graph, or of a graph around."""
        # Tools recognise a value by its symbol. The outermost graph keeps those that the model creates.
        symbol = self._symbols.get(name)
        if symbol is None:
            symbol = self._outer_symbol(name)
            if not self.path:
                self._symbols[name] = symbol
        return symbol

    def sides(self, node: NamedNode) -> tuple[Side, Side]:
        """Return the inputs and outputs of a node, in the order of its schema."""
        opsets = self.rewriting.model.opsets
        return (
            self._side(node.proto.input, input_layout(node.proto, opsets).sizes),
            self._side(node.proto.output, output_layout(node.proto, opsets).sizes),
        )

    def facts(self, node: NamedNode, inputs: Side) -> OpFacts:
        """Return the facts of a node, for tools."""
        rewriting = self.rewriting
        place = "/".join((*self.path, node.name))
        names = input_layout(node.proto, rewriting.model.opsets).names
        original = computation_of(node.proto, inputs, rewriting.model)
        return facts_of(
            node.proto, place, digest(rewriting.identity, place), rewriting.namespace, names, inputs,
            rewriting.identity, original,
        )  # fmt: skip

    def write_node(self, node: NamedNode, inputs: Side, outputs: Side) -> None:
        """Add a copy of a node; a node that only rearranges a constant is computed here instead.

        The latter's result is a constant of the model, but in bodies and files, which have the node, too.
        """
        # A copy, since the model is rewritten again for others; `rewrite_inner_graphs` edits its bodies.
        self._copied_node = copy = NodeProto()
        copy.CopyFrom(node.proto)
        copy.input[:] = inputs.refs
        array = rearrange_constant(copy, inputs.symbols)
        if array is not None:
            name, operand = copy.output[0], inputs.symbols[0]
            root = None if operand is None else operand.root
            symbol = OnnxSymbol.of_array(name, array, root)
            self._symbols[name] = outputs.symbols[0] = symbol
            # A constant in a body cannot be a constant of the model: other bodies may use the same name.
            if not self.rewriting.is_for_file and not self.path:
                self.rewriting.constants[name] = array
                return
        self.items.append(ComputedNode(copy))

    def note_effects(self, node: NamedNode, inputs: Side, outputs: Side, replaced: bool) -> None:
        """Record at a node's result the initializer that the node casts or rearranges, if it does.

        If all operands have values before the model runs, also a function that computes the result.
        """
        result = outputs.symbols[0] if outputs.symbols and not replaced else None
        operands = [symbol for symbol in inputs.symbols if symbol is not None]
        if result is None or result.root is not None or not keeps_elements(node.proto):
            return
        is_of_initializers = bool(operands) and all(symbol.root for symbol in operands)
        if not is_of_initializers:
            return
        result.root = operands[0].root
        create_computation = computation_of(node.proto, inputs, self.rewriting.model)
        are_static = all(symbol.constant is not None or symbol.compute for symbol in operands)
        # Computed when a tool reads the value, not for each weight that a graph casts or rearranges.
        if create_computation is not None and are_static:
            result.compute = partial(_compute_from_static, create_computation, list(inputs.symbols))

    def rewrite_inner_graphs(self, node: NamedNode, replaced: bool) -> None:
        """Rewrite the bodies of a node; Python runs the node if a routine in them runs as Python.

        No effect for a replaced node.
        """
        if replaced:
            return
        copied_node = self._copied_node
        opset = self.rewriting.model.opsets.get("", 1)
        may_call_python = (
            self.calls_python and not self.rewriting.is_for_file and is_runnable(copied_node, opset)
        )
        body_by_attribute: dict[str, ControlFlowBody] = {}
        for attribute in copied_node.attribute:
            # Nodes that Python can run have attributes of one graph each.
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                body_by_attribute[attribute.name] = self._rewrite_body(
                    graph, path=(*self.path, node.name, attribute.name),
                    calls_python=may_call_python and is_all_typed(graph), op_type=copied_node.op_type,
                )  # fmt: skip
        if any(body.calls_python for body in body_by_attribute.values()):
            runnable = ControlFlowNode(copied_node, body_by_attribute)
            # Routines after the node may follow the node among the items, so it need not be the last one.
            for i, item in enumerate(self.items):
                if isinstance(item, ComputedNode) and item.node is copied_node:
                    self.items[i] = runnable

    def is_changeable(self, symbol: OnnxSymbol | None) -> bool:
        """Return True for a tensor, a sequence of tensors and an optional tensor."""
        return symbol is not None and symbol.holds_tensors

    def is_computable(self, symbol: OnnxSymbol | None) -> bool:
        """Return True for a tensor."""
        return symbol is not None and symbol.is_tensor

    def complete_insertion(
        self,
        insertion: Insertion,
        symbols: Sequence[OnnxSymbol | None],
        inputs_side: Side,
        outputs_side: Side,
    ) -> Insertion:
        """Set the dtypes of an insertion's results, and the number of loops around it; return it."""
        assert isinstance(insertion, TypedInsertion)
        insertion.dtypes = tuple(None if symbol is None else symbol.dtype for symbol in symbols)
        insertion.loop_depth = self.depth
        return insertion

    def constant_value(self, symbol: OnnxSymbol | None) -> Any:
        """Return the constant of a value; for a file, also a value computed from initializers alone."""
        if symbol is None:
            return None
        return symbol.static_value if self.rewriting.is_for_file else symbol.constant

    def store_constant(self, constant: Any) -> Value:
        """Add an array to the model's constants under a new name; return it as a value.

        The model counts as changed then.
        """
        name = self.rewriting.new_name("constant")
        self.rewriting.constants[name] = constant
        self.rewriting.has_insertions = True
        self._symbols[name] = symbol = OnnxSymbol.of_array(name, constant)
        return Value(name, symbol)

    def inline(
        self, insertion: Insertion, values: Sequence[Value], symbols: Sequence[OnnxSymbol], side: Side
    ) -> list[Value]:
        """Run routines on traced arrays, add the nodes that these record, and return the results.

        Raises NotTraceable for routines that cannot be recorded, and RoutineError as the routine raises it.
        """
        assert isinstance(insertion, TypedInsertion)
        rewriting = self.rewriting
        recorder = NodeRecorder(rewriting.new_name("traced"), rewriting.model.opsets.get("", 1))
        traced_values = [_as_traced(recorder, *value) for value in values]
        try:
            results = self.run_routines(insertion, traced_values)
        except (NotTraceable, RoutineError):
            raise
        # A traced array fails where a routine needs a real one; the routine may still run as Python.
        except (TypeError, AttributeError, ValueError, IndexError, NotImplementedError) as error:
            raise NotTraceable(f"{type(error).__name__}: {error}") from error
        traced_results = []
        for value, dtype in zip(results, insertion.dtypes, strict=True):
            array = value if isinstance(value, TracedArray) else recorder.constant(np.asarray(value, dtype))
            traced_results.append(array.astype(dtype))
        recorded_symbols = {
            array.name: OnnxSymbol(array.name, array.type, recorder.constants.get(array.name))
            for array in recorder.values
        }
        self.items += [ComputedNode(node) for node in recorder.nodes]
        rewriting.constants |= recorder.constants
        for name, symbol in recorded_symbols.items():
            self._symbols.setdefault(name, symbol)
        return [Value(array.name, recorded_symbols[array.name]) for array in traced_results]

    def write_call(
        self, insertion: Insertion, values: Sequence[Value], symbols: Sequence[OnnxSymbol], side: Side
    ) -> list[Value]:
        """Add routines that Python runs between two sessions; return their results."""
        rewriting = self.rewriting
        slot = rewriting.add_slot(insertion)
        shape_is_kept = not self.may_change_shapes(insertion)
        results = [symbol.like(rewriting.new_name("given"), shape_is_kept) for symbol in symbols]
        self._symbols |= {symbol.name: symbol for symbol in results}
        # No node reads from routines without results; they still run only when the values of their op exist.
        awaited_refs = [] if results else [ref for ref in (*side.original_refs, *side.refs) if ref]
        refs, result_names = [value.ref for value in values], [symbol.name for symbol in results]
        self.items.append(RoutineCall(slot, refs, result_names, awaited_refs))
        return [Value(symbol.name, symbol) for symbol in results]

    def _declare_body_values(self) -> None:
        """Add the symbols of the body's values, which hide values outside, also renamed ones."""
        types = types_in(self.graph)
        names = [entry.name for entry in (*self.graph.input, *self.graph.initializer)]
        names += [name for node in self.graph.node for name in node.output]
        constants = {tensor.name: array_of(tensor) for tensor in self.graph.initializer}
        for node in self.graph.node:
            value = constant_of(node)
            if value is not None:
                constants[node.output[0]] = value
        for name in names:
            # A value of the body hides a renamed value of the same name outside.
            self.current_refs.pop(name, None)
            root = "/".join((*self.path, name)) if name in constants else None
            self._symbols[name] = OnnxSymbol(name, types.get(name), constants.get(name), root=root)

    def _rewrite_body(
        self, graph: GraphProto, path: tuple[str, ...], calls_python: bool, op_type: str
    ) -> ControlFlowBody:
        """Rewrite a graph, in place unless routines in it run as Python; return it as a body.

        path: of the body, names of nodes and attributes around it.  calls_python: True if routines in it may
        run as Python.  op_type: of the node that has the body.
        """
        # Of the graph as it is before the rewrite.
        inputs, declared = _symbols_of(graph.input), _symbols_of(graph.output)
        constants = {tensor.name: array_of(tensor) for tensor in graph.initializer}
        rewriter = OnnxRewriter(
            graph, self.rewriting, self.symbol, path=path, current_refs=self.current_refs,
            calls_python=calls_python, depth=self.depth + (op_type in LOOPS),
        )  # fmt: skip
        rewriter.run()
        body = ControlFlowBody(
            inputs=inputs,
            outputs=[rewriter.current_refs.get(value.name, value.name) for value in graph.output],
            declared=declared,
            items=rewriter.items,
            symbol=rewriter.symbol,
            constants=constants,
        )
        if not body.calls_python:
            self._write_body(graph, body.items, body.outputs)
        return body

    def _write_body(self, graph: GraphProto, items: Sequence[GraphItem], outputs: Sequence[str]) -> None:
        """Write the rewritten nodes and outputs into the graph of a body, with an Identity where needed."""
        nodes = [item.node for item in items if isinstance(item, ComputedNode)]
        del graph.node[:]
        graph.node.extend(nodes)
        inner_names = {entry.name for entry in (*graph.input, *graph.initializer)}
        inner_names |= {name for node in nodes for name in node.output}
        for output, name in zip(graph.output, outputs, strict=True):
            if name not in inner_names:  # a body cannot return a value of the graph around
                outer_name, name = name, self.rewriting.new_name("given")
                graph.node.append(onnx.helper.make_node("Identity", [outer_name], [name]))
            output.name = name

    def _side(self, names: Sequence[str], sizes: Sequence[int | None]) -> Side:
        left_out = [i for i, name in enumerate(names) if not name]
        return Side(names, [self.symbol(name) if name else None for name in names], sizes, left_out)


def _symbols_of(entries: Iterable[ValueInfoProto]) -> list[OnnxSymbol]:
    """Return the symbols of a graph's inputs or outputs, without a type where the model declares none."""
    return [OnnxSymbol(entry.name, entry.type if entry.HasField("type") else None) for entry in entries]


def _compute_from_static(
    create_computation: Callable[[], Computation], operands: Sequence[OnnxSymbol | None]
) -> Array:
    """Return the result, read-only, of a node whose operands have values before the model runs."""
    values = [None if symbol is None else symbol.static_value for symbol in operands]
    compute = create_computation()
    array: Array = np.asarray(compute(values))
    array.flags.writeable = False
    return array


def _as_traced(recorder: NodeRecorder, ref: str, symbol: OnnxSymbol | None) -> TracedArray:
    if symbol is None or symbol.type is None or not symbol.is_tensor:
        raise NotTraceable(f"{ref} is no tensor, or of a type that is not known before it runs")
    return recorder.value(ref, symbol.type)


def _last_number(graph: GraphProto) -> int:
    """Return the highest number among the names of values that an earlier rewrite added."""
    names = [entry.name for entry in (*graph.node, *graph.initializer)]
    names += [name for node in graph.node for name in node.output]
    return max((int(match[1]) for name in names if (match := _AMANDA_NAME.match(name))), default=0)


def _unique_names(nodes: Sequence[NodeProto]) -> list[str]:
    """Return the nodes' names, with a number where they share one; without a name, type and number."""
    node_count_by_name = Counter(node.name for node in nodes)
    next_number: Counter[str] = Counter()
    names = []
    for node in nodes:
        if node.name and node_count_by_name[node.name] == 1:
            names.append(node.name)
            continue
        stem = node.name or node.op_type
        names.append(f"{stem}:{next_number[stem]}")
        next_number[stem] += 1
    return names
