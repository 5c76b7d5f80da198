"""Analysis of a graph's nodes in order, and the edits that their actions ask for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, NodeProto

from amanda.backend import Action, GraphAnalysis, History, Namespace, OpFacts, Reads, State, Table, digest

from ._computation import computation
from ._facts import facts_of
from ._forms import formed
from ._insertions import Insertions
from ._model import Model, array_of, constant_of, types_in
from ._places import Compute, Item
from ._reads import NumpyReads
from ._schema import input_layout, output_layout
from ._side import Side
from ._symbols import Symbol
from ._tensors import GraphTensors


@dataclass
class Rewriting:
    """One rewrite of a model.

    identity: 64 bits that name the model, the same in every process.
    written: whether the result is to run without Python: what cannot is in `refused`, by the op's facts,
    the action, and why; constants are then given to every routine, once.
    items: the rewritten graph, in order.  constants: arrays that routines made, by name.
    folded: actions whose routines were called once, on constants.
    renamed: what is read instead of a value of the outermost graph.  symbol: that of a value there.
    table: what runs at which slot.  free: whether routines may have changed shapes.
    history: of what traceable routines have read for earlier copies.  reads: what they read for this one.
    traced: these routines, with no tensors: an array is a constant, whoever holds it.
    """

    model: Model
    state: State
    namespace: Namespace
    identity: int
    written: bool = False
    table: Table = field(default_factory=Table)
    items: list[Item] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    reports: dict[tuple[str, str], None] = field(default_factory=dict)
    refused: list[tuple[OpFacts, Any, str]] = field(default_factory=list)
    folded: list[Any] = field(default_factory=list)
    changed: bool = False
    free: bool = False
    history: History = field(default_factory=lambda: History(NumpyReads))
    reads: Reads = field(default_factory=NumpyReads)
    traced: list[tuple[Action, tuple[()]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ops = GraphTensors()
        self.analysis = GraphAnalysis(self.state, self.ops)
        self.made = _last_number(self.model.proto.graph)
        self.symbol: Callable[[str], Symbol] = self.model.symbol

    def run(self) -> None:
        """Analyse every node, those in bodies of control flow too, and put the actions among them."""
        graph = self.model.proto.graph
        rewriter = Rewriter(graph, self, self.model.symbol)
        rewriter.run()
        self.items, self.renamed = rewriter.items, rewriter.current
        self.symbol = rewriter.symbol

    def report(self, what: str, reason: str) -> None:
        """Note what tools do not see."""
        self.reports.setdefault((what, reason))

    def tell_unfollowed(self) -> None:
        """Note what traceable routines set: a copy does not."""
        for what, reason in self.reads.unfollowed(self.traced):
            self.report(what, reason)

    def fresh(self, kind: str) -> str:
        """A name that no value has."""
        self.made += 1
        return f"amanda/{kind}{self.made}"


class Rewriter:
    """The rewrite of one graph: the outermost one, or a body of control flow.

    path: names of the nodes that the body is in.  current: what is read instead of a value.
    """

    def __init__(
        self,
        graph: GraphProto,
        rewriting: Rewriting,
        symbol: Callable[[str], Symbol],
        path: tuple[str, ...] = (),
        current: dict[str, str] | None = None,
    ) -> None:
        self.graph = graph
        self.rewriting = rewriting
        self.path = path
        self.current = dict(current or {})
        self.items: list[Item] = []
        self._outer_symbol = symbol
        self._symbols: dict[str, Symbol] = {}
        self._insertions = Insertions(rewriting, self.items, self._symbols, is_body=bool(path))
        self._names = _unique_names(graph.node)
        if path:
            self._declare()

    def run(self) -> None:
        """Go through the nodes in order, which is that of the data."""
        for node, name in zip(self.graph.node, self._names, strict=True):
            self._at(node, name)

    def symbol(self, name: str) -> Symbol:
        """The symbol of a value, here or in a graph around."""
        known = self._symbols.get(name)
        if known is None:
            known = self._outer_symbol(name)
            if not self.path:
                self._symbols[name] = known
        return known

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

    def _at(self, node: NodeProto, name: str) -> None:
        rewriting, opsets = self.rewriting, self.rewriting.model.opsets
        input_names, input_sizes = input_layout(node, opsets)
        _, output_sizes = output_layout(node, opsets)
        inputs = self._side(node.input, input_sizes)
        outputs = self._side(node.output, output_sizes)
        place = "/".join((*self.path, name))
        identity = digest(rewriting.identity, place)
        original = computation(node, inputs, rewriting.model)
        facts = facts_of(
            node, place, identity, rewriting.namespace, input_names, inputs, rewriting.identity, original
        )
        combined = rewriting.analysis.forward(facts, outputs.values)
        copy = NodeProto()
        copy.CopyFrom(node)
        inputs.read(self.current)
        self._insertions.insert_all(combined.before, inputs, facts)
        copy.input[:] = inputs.refs
        replaced = combined.replace is not None and self._insertions.replace(
            combined.replace, inputs, outputs, facts, original
        )
        if not replaced and not self._is_formed(copy, inputs, outputs):
            self.items.append(Compute(copy))
        self._follow(node, inputs, outputs)
        self._insertions.insert_all(combined.after, outputs, facts)
        self.current |= {outputs.before[i]: outputs.refs[i] for i in outputs.changed()}
        for attribute in copy.attribute if not replaced else ():
            for body in bodies(attribute):
                self._rewrite_body(body, (*self.path, name, attribute.name))

    def _follow(self, node: NodeProto, inputs: Side, outputs: Side) -> None:
        """Know of what a node turns into another type whether an initializer holds it."""
        made = outputs.symbols[0] if node.op_type in _TYPING and outputs.symbols else None
        if made is not None and made.root is None and all(one is None or one.root for one in inputs.symbols):
            first = inputs.symbols[0]
            made.root = first.root if first is not None else None

    def _is_formed(self, node: NodeProto, inputs: Side, outputs: Side) -> bool:
        """Whether what a node gives is a constant in another form, so that no session computes it."""
        array = formed(node, inputs.symbols)
        if array is None:
            return False
        name, source = node.output[0], inputs.symbols[0]
        root = None if source is None else source.root
        self._symbols[name] = outputs.symbols[0] = Symbol.of_array(name, array, root)
        if self.rewriting.written or self.path:  # names in a body are its own
            return False
        self.rewriting.constants[name] = array
        return True

    def _rewrite_body(self, body: GraphProto, path: tuple[str, ...]) -> None:
        rewriter = Rewriter(body, self.rewriting, self.symbol, path, self.current)
        rewriter.run()
        nodes = [item.node for item in rewriter.items if isinstance(item, Compute)]
        del body.node[:]
        body.node.extend(nodes)
        own = {one.name for one in (*body.input, *body.initializer)}
        own |= {name for node in nodes for name in node.output}
        for output in body.output:
            name = rewriter.current.get(output.name, output.name)
            if name not in own:  # a constant outside, which a body may not give as it is
                given, name = name, self.rewriting.fresh("given")
                body.node.append(onnx.helper.make_node("Identity", [given], [name]))
            output.name = name

    def _side(self, names: Sequence[str], sizes: Sequence[int | None]) -> Side:
        return Side(names, [self.symbol(name) if name else None for name in names], sizes)


_OURS = re.compile(r"amanda/[a-z]+(\d+)")


def _last_number(graph: GraphProto) -> int:
    """The highest number among the names of what was written into a graph before."""
    names = [one.name for one in (*graph.node, *graph.initializer)]
    names += [name for node in graph.node for name in node.output]
    return max((int(found[1]) for name in names if (found := _OURS.match(name))), default=0)


_TYPING = ("Cast", "DequantizeLinear")
"""Nodes that give what they are given in another type."""


def bodies(attribute: AttributeProto) -> Iterator[GraphProto]:
    """The graphs that an attribute holds."""
    if attribute.type == AttributeProto.GRAPH:
        yield attribute.g
    elif attribute.type == AttributeProto.GRAPHS:
        yield from attribute.graphs


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
