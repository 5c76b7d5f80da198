"""The rewrite of a model: each node, those in bodies of control flow too, and the routines among them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import GraphProto, NodeProto

from amanda.backend import Insertion, NotTraceable, OpFacts, Rewriter, Rewriting, Side, Value, digest
from amanda.errors import RoutineError

from ._computation import Computation, computation
from ._control_flow import LOOPS, Body, Flow, is_runnable
from ._facts import facts_of
from ._forms import formed, is_plain
from ._model import Model, array_of, constant_of, is_all_typed, types_in
from ._places import Call, Compute, Item, TypedInsertion
from ._schema import input_layout, output_layout
from ._symbols import Array, Symbol
from ._tracing import Recorder, TracedArray

_OURS = re.compile(r"amanda/[a-z]+(\d+)")


@dataclass(kw_only=True)
class ModelRewriting(Rewriting):
    """One rewrite of a model.

    identity: 64 bits that name the model, the same in every process.
    items: the rewritten graph, in order.  constants: arrays that routines made, by name.
    renamed: what is read instead of a value of the outermost graph.  symbol: gives that of a value there.
    """

    model: Model
    identity: int
    items: list[Item] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.made = _last_number(self.model.proto.graph)
        self.symbol: Callable[[str], Symbol] = self.model.symbol

    def run(self) -> None:
        """Analyse every node, and put the actions that tools record among them."""
        rewriter = GraphRewriter(self.model.proto.graph, self, self.model.symbol)
        rewriter.run()
        self.items, self.renamed, self.symbol = rewriter.items, rewriter.current, rewriter.symbol

    def fresh(self, kind: str) -> str:
        """A name that no value has."""
        self.made += 1
        return f"amanda/{kind}{self.made}"


class Named(NamedTuple):
    """A node of a graph, and its name: a made one where the node has none of its own."""

    proto: NodeProto
    name: str


class GraphRewriter(Rewriter[Named]):
    """The rewrite of one graph: the outermost one, or a body of control flow.

    path: names of the nodes that the body is in.  symbol: gives that of a value of the graph around.
    depth: number of loops around it.  items: the rewritten graph, in order.
    """

    insertion = TypedInsertion
    rewriting: ModelRewriting

    def __init__(
        self,
        graph: GraphProto,
        rewriting: ModelRewriting,
        symbol: Callable[[str], Symbol],
        path: tuple[str, ...] = (),
        current: dict[str, str] | None = None,
        calls_python: bool = True,
        depth: int = 0,
    ) -> None:
        super().__init__(rewriting, current, calls_python=calls_python)
        self.graph = graph
        self.path = path
        self.depth = depth
        self.items: list[Item] = []
        self._outer_symbol = symbol
        self._symbols: dict[str, Symbol] = {}
        if path:
            self._declare()

    def nodes(self) -> Iterator[Named]:
        """The nodes in the order of the graph, which is that of the data."""
        return map(Named, self.graph.node, _unique_names(self.graph.node))

    def symbol(self, name: str) -> Symbol:
        """The symbol of a value, here or in a graph around."""
        known = self._symbols.get(name)
        if known is None:
            known = self._outer_symbol(name)
            if not self.path:
                self._symbols[name] = known
        return known

    def sides(self, node: Named) -> tuple[Side, Side]:
        """The inputs and outputs of a node, in the order of its schema; an optional one may be left out."""
        opsets = self.rewriting.model.opsets
        return (
            self._side(node.proto.input, input_layout(node.proto, opsets)[1]),
            self._side(node.proto.output, output_layout(node.proto, opsets)[1]),
        )

    def facts(self, node: Named, inputs: Side) -> OpFacts:
        """Facts of a node, for tools."""
        rewriting = self.rewriting
        place = "/".join((*self.path, node.name))
        names = input_layout(node.proto, rewriting.model.opsets)[0]
        original = computation(node.proto, inputs, rewriting.model)
        return facts_of(
            node.proto, place, digest(rewriting.identity, place), rewriting.namespace, names, inputs,
            rewriting.identity, original,
        )  # fmt: skip

    def keep(self, node: Named, inputs: Side, outputs: Side) -> None:
        """Write a node; what gives a constant in another form is computed here, and in no session."""
        self._kept = copy = NodeProto()
        copy.CopyFrom(node.proto)
        copy.input[:] = inputs.refs
        array = formed(copy, inputs.symbols)
        if array is not None:
            name, source = copy.output[0], inputs.symbols[0]
            root = None if source is None else source.root
            self._symbols[name] = outputs.symbols[0] = Symbol.of_array(name, array, root)
            if not self.rewriting.written and not self.path:  # names in a body are its own
                self.rewriting.constants[name] = array
                return
        self.items.append(Compute(copy))

    def follow(self, node: Named, inputs: Side, outputs: Side, replaced: bool) -> None:
        """Know of what a node makes in another type or form of initializers, and how to compute it."""
        made = outputs.symbols[0] if outputs.symbols and not replaced else None
        read = [one for one in inputs.symbols if one is not None]
        if made is None or made.root is not None or not read or not all(one.root for one in read):
            return
        if not is_plain(node.proto):
            return
        made.root = read[0].root
        make = computation(node.proto, inputs, self.rewriting.model)
        if make is not None and all(one.constant is not None or one.compute for one in read):
            made.compute = partial(_computed, make, list(inputs.symbols))

    def leave(self, node: Named, replaced: bool) -> None:
        """Rewrite the graphs that a node holds; Python runs the node where routines in them call Python."""
        if replaced:
            return
        kept = self._kept
        opset = self.rewriting.model.opsets.get("", 1)
        calls_python = self.calls_python and not self.rewriting.written and is_runnable(kept, opset)
        bodies: dict[str, list[Body]] = {}
        for attribute in kept.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                path = (*self.path, node.name, attribute.name)
                bodies.setdefault(attribute.name, []).append(
                    self._rewrite_body(graph, path, calls_python and is_all_typed(graph), kept.op_type)
                )
        if any(body.calls_python for own in bodies.values() for body in own):
            at = next(
                i for i, item in enumerate(self.items) if isinstance(item, Compute) and item.node is kept
            )
            self.items[at] = Flow(kept, {name: body for name, (body,) in bodies.items()})

    def can_give(self, symbol: Symbol | None) -> bool:
        """Return True for a tensor, a sequence of tensors and an optional one."""
        return symbol is not None and symbol.holds_tensors

    def can_replace(self, symbol: Symbol | None) -> bool:
        """Return True for a tensor."""
        return symbol is not None and symbol.is_tensor

    def formed(
        self, place: Insertion, wanted: Sequence[Symbol | None], given_of: Side, gives_to: Side
    ) -> Insertion:
        """Give a place the types that its results have to have."""
        assert isinstance(place, TypedInsertion)
        place.dtypes = tuple(None if one is None else one.dtype for one in wanted)
        place.depth = self.depth
        return place

    def constant(self, symbol: Symbol | None) -> Any:
        """Return what a value always is; for a file also what nodes make of initializers."""
        if symbol is None:
            return None
        return symbol.known if self.rewriting.written else symbol.constant

    def stored(self, constant: Any) -> Value:
        """Put an array into the model."""
        name = self.rewriting.fresh("constant")
        self.rewriting.constants[name] = constant
        self.rewriting.changed = True
        self._symbols[name] = symbol = Symbol.of_array(name, constant)
        return Value(name, symbol)

    def inline(
        self, place: Insertion, given: Sequence[Value], wanted: Sequence[Symbol], side: Side
    ) -> list[Value]:
        """Write the nodes that routines come to.

        Raises NotTraceable, and what is a mistake in the routine itself as that.
        """
        assert isinstance(place, TypedInsertion)
        rewriting = self.rewriting
        recorder = Recorder(rewriting.fresh("traced"), rewriting.model.opsets.get("", 1))
        traced = [_traced(recorder, *one) for one in given]
        try:
            results = self.results(place, traced)
        except (NotTraceable, RoutineError):
            raise
        except (TypeError, AttributeError, ValueError, IndexError, NotImplementedError) as error:
            raise NotTraceable(f"{type(error).__name__}: {error}") from error
        made = []
        for value, dtype in zip(results, place.dtypes, strict=True):
            array = value if isinstance(value, TracedArray) else recorder.constant(np.asarray(value, dtype))
            made.append(array.astype(dtype))
        symbols = {
            one.name: Symbol(one.name, one.type, recorder.constants.get(one.name)) for one in recorder.values
        }
        self.items += [Compute(node) for node in recorder.nodes]
        rewriting.constants |= recorder.constants
        for name, symbol in symbols.items():
            self._symbols.setdefault(name, symbol)
        return [Value(one.name, symbols[one.name]) for one in made]

    def call(
        self, place: Insertion, given: Sequence[Value], wanted: Sequence[Symbol], side: Side
    ) -> list[Value]:
        """Write routines that Python runs between two sessions."""
        rewriting = self.rewriting
        slot = rewriting.add(place)
        shape_is_kept = not self.frees_shapes(place)
        made = [symbol.like(rewriting.fresh("given"), shape_is_kept) for symbol in wanted]
        self._symbols |= {symbol.name: symbol for symbol in made}
        waits = [] if made else [ref for ref in (*side.before, *side.refs) if ref]
        self.items.append(Call(slot, [one.ref for one in given], [symbol.name for symbol in made], waits))
        return [Value(symbol.name, symbol) for symbol in made]

    def _declare(self) -> None:
        """Know what belongs to the body: it hides what has the same name outside."""
        types = types_in(self.graph)
        inner = [one.name for one in (*self.graph.input, *self.graph.initializer)]
        inner += [name for node in self.graph.node for name in node.output]
        values = {tensor.name: array_of(tensor) for tensor in self.graph.initializer}
        values |= {
            node.output[0]: value for node in self.graph.node if (value := constant_of(node)) is not None
        }
        for name in inner:
            self.current.pop(name, None)
            root = "/".join((*self.path, name)) if name in values else None
            self._symbols[name] = Symbol(name, types.get(name), values.get(name), root=root)

    def _rewrite_body(
        self, graph: GraphProto, path: tuple[str, ...], calls_python: bool, around: str
    ) -> Body:
        """Rewrite a graph in place, unless routines in it call Python; return it as a body."""
        depth = self.depth + (around in LOOPS)
        inputs = [Symbol(one.name, one.type if one.HasField("type") else None) for one in graph.input]
        declared = [Symbol(one.name, one.type if one.HasField("type") else None) for one in graph.output]
        constants = {tensor.name: array_of(tensor) for tensor in graph.initializer}
        rewriter = GraphRewriter(graph, self.rewriting, self.symbol, path, self.current, calls_python, depth)
        rewriter.run()
        outputs = [rewriter.current.get(one.name, one.name) for one in graph.output]
        body = Body(inputs, outputs, declared, rewriter.items, rewriter.symbol, constants)
        if not body.calls_python:
            self._write_body(graph, rewriter.items, outputs)
        return body

    def _write_body(self, graph: GraphProto, items: Sequence[Item], outputs: Sequence[str]) -> None:
        nodes = [item.node for item in items if isinstance(item, Compute)]
        del graph.node[:]
        graph.node.extend(nodes)
        own = {one.name for one in (*graph.input, *graph.initializer)}
        own |= {name for node in nodes for name in node.output}
        for output, name in zip(graph.output, outputs, strict=True):
            if name not in own:  # a constant outside, which a body may not give as it is
                given, name = name, self.rewriting.fresh("given")
                graph.node.append(onnx.helper.make_node("Identity", [given], [name]))
            output.name = name

    def _side(self, names: Sequence[str], sizes: Sequence[int | None]) -> Side:
        left_out = [i for i, name in enumerate(names) if not name]
        return Side(names, [self.symbol(name) if name else None for name in names], sizes, left_out)


def _computed(make: Callable[[], Computation], symbols: Sequence[Symbol | None]) -> Array:
    """Return what a node makes of values that are known."""
    made: Array = np.asarray(make()([None if one is None else one.known for one in symbols]))
    made.flags.writeable = False
    return made


def _traced(recorder: Recorder, ref: str, symbol: Symbol | None) -> TracedArray:
    if symbol is None or symbol.type is None or not symbol.is_tensor:
        raise NotTraceable(f"{ref} is no tensor, or of a type that is not known before it runs")
    return recorder.value(ref, symbol.type)


def _last_number(graph: GraphProto) -> int:
    """The highest number among the names of what was written into a graph before."""
    names = [one.name for one in (*graph.node, *graph.initializer)]
    names += [name for node in graph.node for name in node.output]
    return max((int(found[1]) for name in names if (found := _OURS.match(name))), default=0)


def _unique_names(nodes: Sequence[NodeProto]) -> list[str]:
    """The nodes' names; a type and a number for one without a name, or with that of another."""
    counted = Counter(node.name for node in nodes)
    numbers: Counter[str] = Counter()
    names = []
    for node in nodes:
        if node.name and counted[node.name] == 1:
            names.append(node.name)
            continue
        stem = node.name or node.op_type
        names.append(f"{stem}:{numbers[stem]}")
        numbers[stem] += 1
    return names
