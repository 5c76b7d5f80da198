"""The ops of a program, the matches of rules among them, and the choice of matches to replace."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import amanda
from amanda.tools.kit import Dataflow, DataflowNode
from amanda.tools.rewrite._pattern import Maybe, Op, Pattern, Rule
from amanda.tools.rewrite._result import Rewritten

Edge = tuple[int, int]
"""An input of an op: the op's id, and the position."""

_FORM_READERS = frozenset({"size", "dim", "numel", "Shape", "ShapeN", "Size", "Rank"})


@dataclass(eq=False)
class Node:
    """One op of the program, at its last analysis.

    order: of first analyses.  rewrites: replacements of named rules that the framework has.
    flow: numbers of the tensors that the op reads.  fits: the ops of patterns that accept the op.
    compute: in a graph, a function from inputs to the output.  values: in a graph, weak references to the
    symbols of the inputs.  readers: ids of the ops that read the output.
    """

    id: int
    order: int
    type: str
    name: str
    module: str
    source: str
    framework: str
    rewrites: Mapping[str, Callable[[Any], Any]]
    is_eager: bool
    in_place: bool
    op: Any
    attributes: Mapping[str, Any]
    flow: DataflowNode
    fits: frozenset[Op] = frozenset()
    compute: Callable[[Sequence[Any]], Any] | None = None
    values: Sequence[Callable[[], Any]] = ()
    readers: set[int] = field(default_factory=set)


class Found(NamedTuple):
    """A match: ids of ops by pattern, captured inputs by name, and the maker of each inner input."""

    ops: dict[Op, int]
    captures: dict[str, Edge]
    edges: dict[Edge, int]


@dataclass(eq=False)
class Site:
    """A match of a rule at one place of the program.

    members: ids of the ops, in the order of execution; the last one is replaced.  order: among sites.
    replaced: number of replaced executions.  fallbacks: executions of the original instead, by reason.
    broken: the reason, found in an execution, why the match is no longer replaced.
    obstacle: the reason why the match is not replaced; "" if it is.
    """

    rule: Rule
    found: Found
    members: tuple[int, ...]
    order: tuple[int, int, int]
    replaced: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    broken: str = ""
    obstacle: str = ""

    @property
    def last(self) -> int:
        """Id of the op whose output the replacement computes."""
        return self.members[-1]


class Program:
    """The analysed ops and the matches; of overlapping matches the earliest, then the longest is replaced."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.nodes: dict[int, Node] = {}
        self._rules = rules
        self._patterns = tuple(dict.fromkeys(op for rule in rules for op in rule.ops))
        self._flow = Dataflow()
        self._sites: dict[tuple[str, tuple[int, ...]], Site] = {}
        self._replaced: dict[int, Site] = {}

    def enter(self, context: amanda.OpContext) -> Node:
        """Record an op at its analysis, and the matches that end with the op."""
        op_id, flow = context.get_op_id(), self._flow.node(context)
        node = self.nodes.get(op_id)
        if node is None:
            node = self.nodes[op_id] = Node(
                op_id, len(self.nodes), context["type"], context.get_op_type(), context.get_scope(),
                context.get_source(), context.namespace[0], context["rewrites"], context.is_eager(),
                context["in_place"], context.get_op(), {}, flow,
            )  # fmt: skip
        node.op, node.attributes, node.flow = context.get_op(), context.get_attrs(), flow
        node.fits = frozenset(op for op in self._patterns if op.fits(context))
        if node.fits and not node.is_eager:
            node.compute = context.get_computation()
            node.values = [_weakly(value) for value in context.get_inputs()]
        for number in flow.reads:
            producer = self._producer(number)
            if producer is not None:
                producer.readers.add(op_id)
        for rank, rule in enumerate(self._rules):
            found = max(self._at_op(rule.pattern, node, [], Found({}, {}, {})), key=_size, default=None)
            if found is not None:
                members = sorted((self.nodes[one] for one in found.ops.values()), key=lambda one: one.order)
                ids = (*(one.id for one in members if one is not node), op_id)
                site = Site(rule, found, ids, (members[0].order, -len(members), rank))
                self._sites.setdefault((rule.name, ids), site)
        return node

    def leave(self, context: amanda.OpContext) -> None:
        """Record the outputs of an op that has run."""
        self._flow.made(self.nodes[context.get_op_id()].flow, context.get_outputs() or ())

    def made_by(self, node: Node, value: Any) -> None:
        """Record a tensor as the output of an op, unless it is known."""
        if self._producer(self._flow.number(value)) is not node:
            self._flow.made(node.flow, [value])

    def _producer(self, number: int | None) -> Node | None:
        maker = self._flow.maker(number)
        return None if maker is None else self.nodes.get(maker.op_id)

    def _at_op(
        self, pattern: Op, node: Node, waiting: Sequence[tuple[Pattern, Edge]], found: Found
    ) -> Iterator[Found]:
        """Yield the matches in which a pattern is an op, and waiting patterns fit their inputs."""
        if pattern in found.ops:
            if found.ops[pattern] == node.id:
                yield from self._at_inputs(waiting, found)
        elif pattern in node.fits and node.id not in found.ops.values():
            found = found._replace(ops={**found.ops, pattern: node.id})
            for order in pattern.orders(node.type):
                own = [(one, (node.id, position)) for position, one in enumerate(order)]
                yield from self._at_inputs([*own, *waiting], found)

    def _at_inputs(self, waiting: Sequence[tuple[Pattern, Edge]], found: Found) -> Iterator[Found]:
        """Yield the matches in which waiting patterns fit their inputs.

        Of a position that the op lacks, only None fits: an Op wants a maker, a Capture an input.
        """
        if not waiting:
            yield found
            return
        (pattern, edge), *others = waiting
        number = self._read_at(edge)
        if isinstance(pattern, Maybe):
            for one in (pattern.op, pattern.op.passed):
                yield from self._at_inputs([(one, edge), *others], found)
        elif isinstance(pattern, Op):
            producer = self._producer(number)
            if producer is not None:
                found = found._replace(edges={**found.edges, edge: producer.id})
                yield from self._at_op(pattern, producer, others, found)
        elif pattern is None:
            yield from self._at_inputs(others, found)
        elif pattern.name not in found.captures:
            if edge[1] < len(self.nodes[edge[0]].flow.inputs):
                captures = {**found.captures, pattern.name: edge}
                yield from self._at_inputs(others, found._replace(captures=captures))
        elif number is not None and number == self._read_at(found.captures[pattern.name]):
            yield from self._at_inputs(others, found)

    def _read_at(self, edge: Edge) -> int | None:
        """Return the number of the tensor at an input; None for another value, and without such an input."""
        inputs = self.nodes[edge[0]].flow.inputs
        return inputs[edge[1]] if edge[1] < len(inputs) else None

    def site_of(self, op_id: int) -> Site | None:
        """Return the replaced match that an op belongs to."""
        return self._replaced.get(op_id)

    def decide(self) -> set[int]:
        """Choose the matches to replace; return the ids of ops for which the choice has changed."""
        replaced: dict[int, Site] = {}
        for site in self._in_order():
            site.obstacle = site.broken or self._obstacle(site)
            overlapping = next((replaced[one] for one in site.members if one in replaced), None)
            if overlapping is not None and not site.obstacle:
                site.obstacle = f"it overlaps with {overlapping.rule.name}, which begins earlier or is longer"
            if not site.obstacle:
                replaced |= dict.fromkeys(site.members, site)
        before, self._replaced = self._replaced, replaced
        return {one for one in before.keys() | replaced if before.get(one) is not replaced.get(one)}

    def _in_order(self) -> list[Site]:
        return sorted(self._sites.values(), key=lambda site: site.order)

    def _obstacle(self, site: Site) -> str:
        """Return the reason why the ops of a match cannot be replaced as one; "" without a reason."""
        for one in site.members if len(site.members) > 1 else ():
            node = self.nodes[one]
            if node.in_place:
                return f"{node.name} writes in place"
            readers = node.readers.difference(site.members) if one != site.last else ()
            for reader in (self.nodes[index] for index in readers):
                if reader.type not in _FORM_READERS:
                    return f"what {node.type} makes is read by {reader.type}, {reader.source}"
        return ""

    def matches(self) -> list[Rewritten]:
        """Return the outcome of each match, in the order of execution."""
        found = []
        for site in self._in_order():
            ops, last = tuple(self.nodes[one].type for one in site.members), self.nodes[site.last]
            told = ("forward", last.type, last.module, last.source, site.rule.name, ops)
            found.append(Rewritten(*told, site.replaced, dict(site.fallbacks), site.obstacle))
        return found


def _size(found: Found) -> int:
    return len(found.ops)


def _weakly(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
