"""The ops of a program, matches of rules among these, and the executions that replacements read."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import amanda
from amanda.backend import TensorMap
from amanda.tools.dataflow import Dataflow, DataflowNode
from amanda.tools.rewrite._rules import Maybe, Op, Pattern, PatternError, Rule

Edge = tuple[int, int]
"""An input of an op: the op's id, and the position."""

# Ops that read nothing but a shape, which an intermediate has without being computed.
_SHAPE_READERS = frozenset({"size", "dim", "numel", "Shape", "ShapeN", "Size", "Rank"})


@dataclass(eq=False)
class ProgramNode:
    """An op of the program, at its last analysis.

    order: its number among first analyses.  rewrites: the framework's replacements, by name of rule.
    flow: numbers of the tensors that the op reads.  fitting_patterns: those that accept the op.
    compute: in a graph, a function of the inputs that returns the output.  input_symbols: in a graph, weak
    references to the symbols of the inputs.  reader_ids: of the ops that read the output.
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
    fitting_patterns: frozenset[Op] = frozenset()
    compute: Callable[[Sequence[Any]], Any] | None = None
    input_symbols: Sequence[Callable[[], Any]] = ()
    reader_ids: set[int] = field(default_factory=set)


class PatternBinding(NamedTuple):
    """The ids of ops by pattern, captured inputs by name, and the producer of each input within a match."""

    op_ids: dict[Op, int]
    captures: dict[str, Edge]
    producer_ids: dict[Edge, int]


@dataclass(eq=False)
class MatchSite:
    """A match of a rule in the program.

    members: ids of the ops, in the order of execution; the last op is replaced.  sort_key: sorts sites.
    replaced: number of replaced executions.  fallbacks: numbers of executions of the original, by reason.
    broken: the reason, from an execution, why the match is no longer replaced.
    obstacle: the reason why the match is not replaced; "" if it is replaced.
    """

    rule: Rule
    binding: PatternBinding
    members: tuple[int, ...]
    sort_key: tuple[int, int, int]
    replaced: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    broken: str = ""
    obstacle: str = ""

    @property
    def last(self) -> int:
        """Id of the op whose output the replacement computes."""
        return self.members[-1]


class ProgramMatches:
    """Nodes of the analysed ops, and sites of matches; if some overlap, the first and longest is replaced."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.nodes: dict[int, ProgramNode] = {}
        self._rules = rules
        self._patterns = tuple(dict.fromkeys(op for rule in rules for op in rule.ops))
        self._flow = Dataflow()
        self._sites: dict[tuple[str, tuple[int, ...]], MatchSite] = {}  # by the rule's name and member ids
        self._replaced_site_by_op: dict[int, MatchSite] = {}  # of the last `choose_matches`

    def record_op(self, context: amanda.OpContext) -> ProgramNode:
        """Record an op, and each rule's longest match that ends with it; return the op's one node.

        Calls the patterns' `where`, and records the op as a reader of the ops that produced its inputs.
        """
        op_id, flow = context.get_op_id(), self._flow.node(context)
        node = self.nodes.get(op_id)
        if node is None:
            node = self.nodes[op_id] = ProgramNode(
                id=op_id, order=len(self.nodes), type=context["type"], name=context.get_op_type(),
                module=context.get_scope(), source=context.get_source(), framework=context.namespace[0],
                rewrites=context["rewrites"], is_eager=context.is_eager(), in_place=context["in_place"],
                op=context.get_op(), attributes={}, flow=flow,
            )  # fmt: skip
        # At each analysis anew: shapes and attributes may differ from those of the first one.
        node.op, node.attributes, node.flow = context.get_op(), context.get_attrs(), flow
        node.fitting_patterns = frozenset(op for op in self._patterns if op.fits(context))
        if node.fitting_patterns and not node.is_eager:
            node.compute = context.get_computation()
            # Weakly: a symbol holds its graph, which may be as large as the model.
            node.input_symbols = [_weak_reference(value) for value in context.get_inputs()]
        for tensor in flow.reads:
            producer = self._producer_node(tensor)
            if producer is not None:
                # A reader outside of a match keeps the match from being replaced, whenever it is met.
                producer.reader_ids.add(op_id)
        self._record_matches(node)
        return node

    def _record_matches(self, last: ProgramNode) -> None:
        """Record for each rule the longest match that ends with an op."""
        for rank, rule in enumerate(self._rules):
            no_binding = PatternBinding(op_ids={}, captures={}, producer_ids={})
            bindings = self._match_op(rule.pattern, last, [], no_binding)
            # The longest: an optional op of the pattern is part of the match if it is there.
            binding = max(bindings, key=_op_count, default=None)
            if binding is None:
                continue
            members = [self.nodes[op_id] for op_id in binding.op_ids.values()]
            members.sort(key=lambda member: member.order)
            # The last op last, though a member may have been analysed after it.
            member_ids = (*(member.id for member in members if member is not last), last.id)
            # Sites are in the order of their begin, the longest first, then in the order of rules.
            sort_key = members[0].order, -len(members), rank
            # An analysis that is repeated finds the same match again, whose counts go on.
            self._sites.setdefault((rule.name, member_ids), MatchSite(rule, binding, member_ids, sort_key))

    def record_outputs(self, context: amanda.OpContext) -> None:
        """Record the outputs of an op that has run."""
        self._flow.made(self.nodes[context.get_op_id()].flow, context.get_outputs() or ())

    def record_output(self, node: ProgramNode, value: Any) -> None:
        """Record a tensor as the output of an op, unless it is recorded already."""
        # A stand-in is a new tensor: later ops are to find the op whose output it stands for.
        if self._producer_node(self._flow.number(value)) is not node:
            self._flow.made(node.flow, [value])

    def _producer_node(self, number: int | None) -> ProgramNode | None:
        """Return the op that produced the tensor of a number; None if no recorded op did."""
        producer = self._flow.maker(number)
        return None if producer is None else self.nodes.get(producer.op_id)

    def _match_op(
        self, pattern: Op, node: ProgramNode, pending: Sequence[tuple[Pattern, Edge]], binding: PatternBinding
    ) -> Iterator[PatternBinding]:
        """Yield extensions of a binding in which a pattern is this op, and pending ones fit their edges."""
        if pattern in binding.op_ids:  # a pattern that occurs twice fits one op, not two equal ones
            if binding.op_ids[pattern] == node.id:
                yield from self._match_inputs(pending, binding)
        elif pattern in node.fitting_patterns and node.id not in binding.op_ids.values():
            binding = binding._replace(op_ids={**binding.op_ids, pattern: node.id})
            # All orders: which input of a commutative op is the pattern's first one shows further up alone.
            for ordered_inputs in pattern.orders(node.type):
                patterns_and_edges = [
                    (input_pattern, (node.id, position))
                    for position, input_pattern in enumerate(ordered_inputs)
                ]
                yield from self._match_inputs([*patterns_and_edges, *pending], binding)

    def _match_inputs(
        self, pending: Sequence[tuple[Pattern, Edge]], binding: PatternBinding
    ) -> Iterator[PatternBinding]:
        """Yield the extensions of a binding in which each pending pattern fits the input at its edge.

        Only None fits an input that the op lacks: an Op needs a producer, and a Capture an input.  A name
        that is captured twice stands for one tensor.
        """
        if not pending:
            yield binding
            return
        (pattern, edge), *remaining = pending
        tensor = self._tensor_at(edge)  # its number; None for another value
        if isinstance(pattern, Maybe):
            # With the optional op first; without it, the pattern of its input takes its place.
            for option in (pattern.op, pattern.op.first_input):
                yield from self._match_inputs([(option, edge), *remaining], binding)
        elif isinstance(pattern, Op):
            producer = self._producer_node(tensor)
            if producer is not None:
                binding = binding._replace(producer_ids={**binding.producer_ids, edge: producer.id})
                yield from self._match_op(pattern, producer, remaining, binding)
        elif pattern is None:
            yield from self._match_inputs(remaining, binding)
        elif pattern.name not in binding.captures:
            # A capture needs an input, be it no tensor; an op's inputs are as many as it was called with.
            op_id, position = edge
            if position < len(self.nodes[op_id].flow.inputs):
                captures = {**binding.captures, pattern.name: edge}
                yield from self._match_inputs(remaining, binding._replace(captures=captures))
        elif tensor is not None and tensor == self._tensor_at(binding.captures[pattern.name]):
            yield from self._match_inputs(remaining, binding)

    def _tensor_at(self, edge: Edge) -> int | None:
        """Return the number of the tensor at an input; None for another value, and without such an input."""
        op_id, position = edge
        inputs = self.nodes[op_id].flow.inputs
        return inputs[position] if position < len(inputs) else None

    def site_of(self, op_id: int) -> MatchSite | None:
        """Return the replaced match that an op belongs to."""
        return self._replaced_site_by_op.get(op_id)

    def choose_matches(self) -> set[int]:
        """Choose the matches to replace; return the ids of ops for which the choice has changed.

        Each site gets its `obstacle`.
        """
        site_by_op: dict[int, MatchSite] = {}
        for site in self._in_order():
            # In the order of priority: a match that cannot be replaced leaves its ops to a later one.
            site.obstacle = site.broken or self._find_obstacle(site)
            rival = next((site_by_op[op_id] for op_id in site.members if op_id in site_by_op), None)
            if rival is not None and not site.obstacle:
                site.obstacle = f"it overlaps with {rival.rule.name}, which begins earlier or is longer"
            if not site.obstacle:
                site_by_op |= dict.fromkeys(site.members, site)
        earlier_sites, self._replaced_site_by_op = self._replaced_site_by_op, site_by_op
        op_ids = earlier_sites.keys() | site_by_op
        # Sites are compared by identity: these ops have plans for another match, or for none.
        return {op_id for op_id in op_ids if earlier_sites.get(op_id) is not site_by_op.get(op_id)}

    def _in_order(self) -> list[MatchSite]:
        return sorted(self._sites.values(), key=lambda site: site.sort_key)

    def _find_obstacle(self, site: MatchSite) -> str:
        """Return the reason why the ops of a match cannot be replaced together; "" without a reason.

        An op outside of the match that reads a shape alone is no reason.
        """
        # A match of one op has no output within it that others could read.
        for op_id in site.members if len(site.members) > 1 else ():
            node = self.nodes[op_id]
            # The program sees what an op in place writes, also if its result is never read.
            if node.in_place:
                return f"{node.name} writes in place"
            readers = node.reader_ids.difference(site.members) if op_id != site.last else ()
            for reader in (self.nodes[index] for index in readers):
                if reader.type not in _SHAPE_READERS:
                    return f"what {node.type} makes is read by {reader.type}, {reader.source}"
        return ""

    def list_outcomes(self) -> list[Rewritten]:
        """Return for each match how often it was replaced and why not, in the order of execution."""
        outcomes = []
        for site in self._in_order():
            op_types, last = tuple(self.nodes[op_id].type for op_id in site.members), self.nodes[site.last]
            outcomes.append(Rewritten(
                "forward", last.type, last.module, last.source, site.rule.name, op_types, site.replaced,
                dict(site.fallbacks), site.obstacle,
            ))  # fmt: skip
        return outcomes


def _op_count(binding: PatternBinding) -> int:
    return len(binding.op_ids)


def _weak_reference(value: Any) -> Callable[[], Any]:
    """Return a weak reference, or a function that returns a value which cannot be weakly referenced."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


@dataclass(eq=False)
class OpExecution:
    """An execution of an op of a match, with the executions that made its inputs.

    producers: the executions that made the inputs.  compute: function of the inputs that returns the output.
    is_used: True once the match was replaced.  reader: the first reader of the output outside of the match.
    """

    node: ProgramNode
    inputs: Sequence[Any]
    compute: Callable[..., Any]
    producers: Sequence[OpExecution | None] = ()
    is_used: bool = False
    reader: str = ""

    @property
    def is_intact(self) -> bool:
        """True if the inputs of the op were not written since it was called."""
        # Ops that are computed at once: outputs stay as they were made.
        return True

    def is_read(self) -> bool:
        """Return True if an op outside of the match has read the output, or a hook wants its gradient."""
        return bool(self.reader)


class OpExecutions:
    """Records of executions by their outputs, in a framework whose ops cannot be delayed.

    on_read: called with each execution whose output is read outside of the match.
    """

    def __init__(self, on_read: Callable[[OpExecution], None]) -> None:
        self._on_read = on_read
        self._by_output = TensorMap[OpExecution]()

    def run_or_delay(self, node: ProgramNode, inputs: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """Run an op, return its output, and record its execution by the output, unless that is a list.

        A subclass may return a delayed output.
        """
        # Producers first: an op in place may give back its input, which then has this execution.
        producers, value = self.producers(inputs), compute(*inputs)
        # A list of outputs has no place in a match, whose inner ops have one output each.
        if hasattr(value, "dtype"):
            self._by_output[value] = OpExecution(node, inputs, compute, producers)
        return value

    def producers(self, inputs: Sequence[Any]) -> list[OpExecution | None]:
        """Return the execution that made each input; None for inputs of other origin."""
        return [self.execution_of(value) for value in inputs]

    def execution_of(self, value: Any) -> OpExecution | None:
        """Return the execution that made a value; None if no op of a match did."""
        return self._by_output.get(value)

    def compute_delayed(self, written: Sequence[Any] = ()) -> None:
        """Compute each delayed op that reads a tensor of `written`; without tensors, each delayed op.

        The base delays no op.
        """


class OpCall:
    """An op of a match at an execution; a call computes the op.

    type: StandardMapping's word.  name: the framework's name.  inputs: in the order of the schema; None for
    an input that another op of the match makes.  attributes: the arguments that are not tensors, by name.
    """

    def __init__(self, execution: OpExecution, site: MatchSite) -> None:
        node = execution.node
        self.type, self.name, self.framework = node.type, node.name, node.framework
        self.attributes, self.rewrites = node.attributes, node.rewrites
        inner_edges = site.binding.producer_ids
        self.inputs: tuple[Any, ...] = tuple(
            # What another op of the match makes may be a stand-in, and computing it would undo the rewriting.
            [None if (node.id, i) in inner_edges else value for i, value in enumerate(execution.inputs)]
        )
        self._compute = execution.compute

    def __call__(self, *inputs: Any) -> Any:
        """Compute the op for all of its inputs; without arguments, for those of this execution."""
        return self._compute(*(inputs or self.inputs))


class Match:
    """A match at an execution.  ops: the named ops.

    `match["query"]` is the value of a Capture; `"mask" in match` is False if its op is absent.
    """

    def __init__(self, site: MatchSite, executions: Mapping[int, OpExecution]) -> None:
        self._calls = {index: OpCall(execution, site) for index, execution in executions.items()}
        self._site = site
        self._captures = site.binding.captures
        # All ops of a match are of one framework.
        self.framework = self._calls[site.last].framework
        self.ops = {
            op.name: self._calls[op_id] for op, op_id in site.binding.op_ids.items() if op.name is not None
        }

    def __getitem__(self, name: str) -> Any:
        """Return the value of a Capture; raise PatternError if the match has no value of this name."""
        if name not in self._captures:
            names = ", ".join(self._captures) or "nothing"
            raise PatternError(f"the match has captured {names}, not {name!r}; `in` tells what is there")
        index, position = self._captures[name]
        return self._calls[index].inputs[position]

    def __contains__(self, name: str) -> bool:
        return name in self._captures

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a Capture.

        Args:
            name: Name of the Capture in the pattern.
            default: Value for an op that is absent.
        """
        if name not in self:
            return default
        return self[name]

    def original(self) -> Any:
        """Compute the ops of the match as the program does; return the output of the last op."""
        outputs: dict[int, Any] = {}

        def output_of(op_id: int) -> Any:
            """Return the output of an op, after the outputs of the match that it reads."""
            # Each op once: several ops of the match may read one output.
            if op_id not in outputs:
                inputs = list(self._calls[op_id].inputs)
                for (reader_id, position), producer_id in self._site.binding.producer_ids.items():
                    if reader_id == op_id:
                        inputs[position] = output_of(producer_id)
                outputs[op_id] = self._calls[op_id](*inputs)
            return outputs[op_id]

        return output_of(self._site.last)


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
