"""The ops of a program, the matches of rules among them, and the choice of matches to replace."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import amanda
from amanda.tools.kit import Dataflow, DataflowNode
from amanda.tools.results import Column, Result, check_schema, shortened
from amanda.tools.rewrite._pattern import Maybe, Op, Pattern, Rule

Edge = tuple[int, int]
"""An input of an op: the op's id, and the position."""

# Ops that read nothing but a shape, which an intermediate has without being computed.
_SHAPE_READERS = frozenset({"size", "dim", "numel", "Shape", "ShapeN", "Size", "Rank"})


@dataclass(eq=False)
class ProgramNode:
    """An op of the program, at its last analysis.

    order: its number among first analyses.  rewrites: the framework's replacements, by name of rule.
    flow: numbers of the tensors that the op reads.  fits: the ops of patterns that accept the op.
    compute: in a graph, a function of the inputs that returns the output.  values: in a graph, weak
    references to the symbols of the inputs.  readers: ids of the ops that read the output.
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


class PatternBinding(NamedTuple):
    """The ids of ops by pattern, captured inputs by name, and the producer of each input within a match."""

    ops: dict[Op, int]
    captures: dict[str, Edge]
    edges: dict[Edge, int]


@dataclass(eq=False)
class MatchSite:
    """A match of a rule in the program.

    members: ids of the ops, in the order of execution; the last op is replaced.  order: key to sort sites.
    replaced: number of replaced executions.  fallbacks: numbers of executions of the original, by reason.
    broken: the reason, from an execution, why the match is no longer replaced.
    obstacle: the reason why the match is not replaced; "" if it is replaced.
    """

    rule: Rule
    binding: PatternBinding
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


class ProgramMatches:
    """The analysed ops, and their matches; of overlapping matches the earliest, then longest is replaced."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.nodes: dict[int, ProgramNode] = {}
        self._rules = rules
        self._patterns = tuple(dict.fromkeys(op for rule in rules for op in rule.ops))
        self._flow = Dataflow()
        self._sites: dict[tuple[str, tuple[int, ...]], MatchSite] = {}
        self._replaced: dict[int, MatchSite] = {}

    def record_op(self, context: amanda.OpContext) -> ProgramNode:
        """Record an op at its analysis, and for each rule the longest match that ends with the op."""
        op_id, flow = context.get_op_id(), self._flow.node(context)
        node = self.nodes.get(op_id)
        if node is None:
            node = self.nodes[op_id] = ProgramNode(
                op_id, len(self.nodes), context["type"], context.get_op_type(), context.get_scope(),
                context.get_source(), context.namespace[0], context["rewrites"], context.is_eager(),
                context["in_place"], context.get_op(), {}, flow,
            )  # fmt: skip
        node.op, node.attributes, node.flow = context.get_op(), context.get_attrs(), flow
        node.fits = frozenset(op for op in self._patterns if op.fits(context))
        if node.fits and not node.is_eager:
            node.compute = context.get_computation()
            # Weakly: a symbol holds its graph, which may be as large as the model.
            node.values = [_weak_reference(value) for value in context.get_inputs()]
        for number in flow.reads:
            producer = self._producer_node(number)
            if producer is not None:
                producer.readers.add(op_id)
        for rank, rule in enumerate(self._rules):
            binding = max(
                self._match_op(rule.pattern, node, [], PatternBinding({}, {}, {})), key=_num_ops, default=None
            )
            if binding is not None:
                members = sorted(
                    (self.nodes[member] for member in binding.ops.values()), key=lambda member: member.order
                )
                ids = (*(member.id for member in members if member is not node), op_id)
                site = MatchSite(rule, binding, ids, (members[0].order, -len(members), rank))
                self._sites.setdefault((rule.name, ids), site)
        return node

    def record_outputs(self, context: amanda.OpContext) -> None:
        """Record the outputs of an op that has run."""
        self._flow.made(self.nodes[context.get_op_id()].flow, context.get_outputs() or ())

    def record_output(self, node: ProgramNode, value: Any) -> None:
        """Record a tensor as the output of an op, unless it is recorded already."""
        if self._producer_node(self._flow.number(value)) is not node:
            self._flow.made(node.flow, [value])

    def _producer_node(self, number: int | None) -> ProgramNode | None:
        producer = self._flow.maker(number)
        return None if producer is None else self.nodes.get(producer.op_id)

    def _match_op(
        self, pattern: Op, node: ProgramNode, pending: Sequence[tuple[Pattern, Edge]], binding: PatternBinding
    ) -> Iterator[PatternBinding]:
        """Yield the bindings in which a pattern is this op, and pending patterns fit their inputs."""
        if pattern in binding.ops:  # a pattern that occurs twice fits one op, not two equal ones
            if binding.ops[pattern] == node.id:
                yield from self._match_inputs(pending, binding)
        elif pattern in node.fits and node.id not in binding.ops.values():
            binding = binding._replace(ops={**binding.ops, pattern: node.id})
            for order in pattern.orders(node.type):
                input_patterns = [
                    (input_pattern, (node.id, position)) for position, input_pattern in enumerate(order)
                ]
                yield from self._match_inputs([*input_patterns, *pending], binding)

    def _match_inputs(
        self, pending: Sequence[tuple[Pattern, Edge]], binding: PatternBinding
    ) -> Iterator[PatternBinding]:
        """Yield the bindings in which pending patterns fit their inputs.

        Only None fits an input that the op lacks: an Op needs a producer, and a Capture an input.
        """
        if not pending:
            yield binding
            return
        (pattern, edge), *remaining = pending
        number = self._tensor_at(edge)
        if isinstance(pattern, Maybe):
            for option in (pattern.op, pattern.op.first_input):
                yield from self._match_inputs([(option, edge), *remaining], binding)
        elif isinstance(pattern, Op):
            producer = self._producer_node(number)
            if producer is not None:
                binding = binding._replace(edges={**binding.edges, edge: producer.id})
                yield from self._match_op(pattern, producer, remaining, binding)
        elif pattern is None:
            yield from self._match_inputs(remaining, binding)
        elif pattern.name not in binding.captures:
            if edge[1] < len(self.nodes[edge[0]].flow.inputs):
                captures = {**binding.captures, pattern.name: edge}
                yield from self._match_inputs(remaining, binding._replace(captures=captures))
        elif number is not None and number == self._tensor_at(binding.captures[pattern.name]):
            yield from self._match_inputs(remaining, binding)

    def _tensor_at(self, edge: Edge) -> int | None:
        """Return the number of the tensor at an input; None for another value, and without such an input."""
        inputs = self.nodes[edge[0]].flow.inputs
        return inputs[edge[1]] if edge[1] < len(inputs) else None

    def site_of(self, op_id: int) -> MatchSite | None:
        """Return the replaced match that an op belongs to."""
        return self._replaced.get(op_id)

    def choose_matches(self) -> set[int]:
        """Choose the matches to replace; return the ids of ops for which the choice has changed."""
        replaced: dict[int, MatchSite] = {}
        for site in self._in_order():
            site.obstacle = site.broken or self._find_obstacle(site)
            overlapping = next((replaced[op_id] for op_id in site.members if op_id in replaced), None)
            if overlapping is not None and not site.obstacle:
                site.obstacle = f"it overlaps with {overlapping.rule.name}, which begins earlier or is longer"
            if not site.obstacle:
                replaced |= dict.fromkeys(site.members, site)
        earlier, self._replaced = self._replaced, replaced
        return {op_id for op_id in earlier.keys() | replaced if earlier.get(op_id) is not replaced.get(op_id)}

    def _in_order(self) -> list[MatchSite]:
        return sorted(self._sites.values(), key=lambda site: site.order)

    def _find_obstacle(self, site: MatchSite) -> str:
        """Return the reason why the ops of a match cannot be replaced together; "" without a reason."""
        for op_id in site.members if len(site.members) > 1 else ():
            node = self.nodes[op_id]
            if node.in_place:
                return f"{node.name} writes in place"
            readers = node.readers.difference(site.members) if op_id != site.last else ()
            for reader in (self.nodes[index] for index in readers):
                if reader.type not in _SHAPE_READERS:
                    return f"what {node.type} makes is read by {reader.type}, {reader.source}"
        return ""

    def matches(self) -> list[Rewritten]:
        """Return the outcome of each match, in the order of execution."""
        outcomes = []
        for site in self._in_order():
            ops, last = tuple(self.nodes[op_id].type for op_id in site.members), self.nodes[site.last]
            op_facts = ("forward", last.type, last.module, last.source, site.rule.name, ops)
            outcomes.append(Rewritten(*op_facts, site.replaced, dict(site.fallbacks), site.obstacle))
        return outcomes


def _num_ops(binding: PatternBinding) -> int:
    return len(binding.ops)


def _weak_reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


@dataclass(frozen=True)
class Rewritten:
    """A match; phase, type, module and source are of the replaced op.

    rule: its name.  ops: types of all ops of the match, in order.  replaced: number of replaced executions.
    fallbacks: numbers of executions of the original, by reason.  obstacle: why it is never replaced, or "".
    """

    phase: str
    type: str
    module: str
    source: str
    rule: str
    ops: tuple[str, ...]
    replaced: int
    fallbacks: Mapping[str, int]
    obstacle: str = ""

    @property
    def why(self) -> str:
        """Return the reason why the match is never replaced, or reasons why some executions were not."""
        return self.obstacle or "; ".join(f"{reason} ({n})" for reason, n in self.fallbacks.items())


class RewriteResult(Result):
    """A row for each match, in the order of execution."""

    name: ClassVar[str] = "rewrite"
    title = "Rewritten subgraphs"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase", shown=False), Column("type"), Column("module", show=partial(shortened, width=40)),
        Column("source", show=partial(shortened, width=40)), Column("rule"), Column("ops"),
        Column("replaced", show="{:,}".format, total=True),
        Column("fallbacks", show="{:,}".format, total=True), Column("why"),
    )  # fmt: skip

    def __init__(self, matches: Sequence[Rewritten]) -> None:
        self.matches = tuple(matches)

    def count(self, rule: str | None = None) -> int:
        """Return the number of matches that are replaced, of one rule or of all."""
        return sum(not match.obstacle and rule in (None, match.rule) for match in self.matches)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each match."""
        return [
            (match.phase, match.type, match.module, match.source, match.rule, " ".join(match.ops),
             match.replaced, sum(match.fallbacks.values()), match.why)
            for match in self.matches
        ]  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return the matches."""
        return {"matches": [asdict(match) for match in self.matches]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RewriteResult:
        """Return the result that `to_dict` described; raise ValueError for other schemas."""
        check_schema(content, cls.name, cls.version)
        return cls([Rewritten(**{**entry, "ops": tuple(entry["ops"])}) for entry in content["matches"]])

    def merged(self, *results: RewriteResult) -> RewriteResult:
        """Return the matches of this and other runs or ranks."""
        return RewriteResult([match for result in (self, *results) for match in result.matches])

    def notes(self) -> Sequence[str]:
        """Return the number of matches of each rule."""
        if not self.matches:
            return ["No rule's pattern was met."]
        rules = dict.fromkeys(match.rule for match in self.matches)
        counts = ", ".join(f"{rule}: {self.count(rule)}" for rule in rules)
        return [f"Matches that are replaced: {counts}."]
