"""Finding a pattern among ops, from its last op backwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from amanda.tools.rewrite._pattern import Capture, Maybe, Op, PatternError, Rule
from amanda.tools.rewrite._program import Node

Edge = tuple[int, int]
"""An input: the id of the op that reads it, and its position there."""


class Found(NamedTuple):
    """Ops by their patterns, captured inputs by name, and which op makes each input within the match."""

    ops: dict[Op, int]
    captures: dict[str, Edge]
    edges: dict[Edge, int]


def find(rule: Rule, last: Node, nodes: Mapping[int, Node]) -> Found | None:
    """The match of a rule that ends with an op: of several the one with most ops, the first of these."""
    found = list(_at_op(rule.pattern, last, Found({}, {}, {}), nodes))
    return max(found, key=lambda one: len(one.ops), default=None)


def _at_op(pattern: Op, node: Node, found: Found, nodes: Mapping[int, Node]) -> Iterator[Found]:
    if pattern in found.ops:
        if found.ops[pattern] == node.id:
            yield found
        return
    if pattern not in node.fits or node.id in found.ops.values():
        return
    known = found._replace(ops={**found.ops, pattern: node.id})
    for order in pattern.orders(node.type):
        yield from _at_inputs(list(enumerate(order)), node, known, nodes)


def _at_inputs(
    told: Sequence[tuple[int, Op | Maybe | Capture | None]],
    node: Node,
    found: Found,
    nodes: Mapping[int, Node],
) -> Iterator[Found]:
    if not told:
        yield found
        return
    (position, pattern), *others = told
    for one in _at_input(pattern, node, position, found, nodes):
        yield from _at_inputs(others, node, one, nodes)


def _at_input(
    pattern: Op | Maybe | Capture | None, node: Node, position: int, found: Found, nodes: Mapping[int, Node]
) -> Iterator[Found]:
    if pattern is None:
        yield found
    elif position >= len(node.inputs):
        return
    elif isinstance(pattern, Capture):
        edge = node.id, position
        other = found.captures.get(pattern.name)
        if other is None:
            yield found._replace(captures={**found.captures, pattern.name: edge})
        elif _is_same(nodes[other[0]].inputs[other[1]], node.inputs[position]):
            yield found
    elif isinstance(pattern, Maybe):
        yield from _at_input(pattern.op, node, position, found, nodes)
        yield from _at_input(pattern.op.passed, node, position, found, nodes)
    else:
        producer = nodes.get(node.inputs[position].producer or 0)
        if producer is not None:
            edges = {**found.edges, (node.id, position): producer.id}
            yield from _at_op(pattern, producer, found._replace(edges=edges), nodes)


def _is_same(one: Any, other: Any) -> bool:
    return one.key is not None and one == other


@dataclass(eq=False)
class Site:
    """A place in the program where a rule's pattern is.

    members: ids of its ops, in the order of execution; the last one is replaced.
    replaced: executions.  fallbacks: executions of the original instead, by reason.
    broken: why it is not replaced any more, by what executions have shown.
    obstacle: why it is not replaced at all; "" where it is.
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
        """Id of the op whose output is computed otherwise."""
        return self.members[-1]

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """Key of the site among all sites."""
        return self.rule.name, self.members


class OpCall:
    """One op of a match at one execution.

    type: StandardMapping's word.  name: the framework's own.  inputs: in the order of its schema; None where
    another op of the match makes it.  attributes: the arguments that are no tensors, by name.  Calling it
    computes the op, on as many inputs as it has.
    """

    def __init__(self, node: Node, inputs: Sequence[Any], compute: Callable[..., Any]) -> None:
        self.type, self.name = node.type, node.name
        self.inputs = tuple(inputs)
        self.attributes = node.attributes
        self.framework = node.framework
        self._compute = compute

    def __call__(self, *inputs: Any) -> Any:
        """The op's result on these inputs; as given to it in this execution, if there are none."""
        return self._compute(*(inputs or self.inputs))


class Match:
    """A match at one execution: `match["query"]` is what a Capture is, `"mask" in match` whether it is there.

    ops: the named ops.
    """

    def __init__(self, site: Site, calls: Mapping[int, OpCall]) -> None:
        self._calls = calls
        self._site = site
        self._captures = site.found.captures
        self.framework = calls[site.last].framework
        self.ops = {op.name: calls[index] for op, index in site.found.ops.items() if op.name is not None}

    def __getitem__(self, name: str) -> Any:
        edge = self._captures.get(name)
        if edge is None:
            known = ", ".join(self._captures) or "nothing"
            raise PatternError(f"the match has captured {known}, not {name!r}; `in` tells what is there")
        return self._calls[edge[0]].inputs[edge[1]]

    def __contains__(self, name: str) -> bool:
        return name in self._captures

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a Capture; the default where its op is absent."""
        edge = self._captures.get(name)
        return default if edge is None else self._calls[edge[0]].inputs[edge[1]]

    def original(self) -> Any:
        """Compute the ops of the match one by one; return the output of the last."""
        made: dict[int, Any] = {}

        def value(op_id: int) -> Any:
            if op_id not in made:
                inputs = list(self._calls[op_id].inputs)
                for (reader, position), maker in self._site.found.edges.items():
                    if reader == op_id:
                        inputs[position] = value(maker)
                made[op_id] = self._calls[op_id](*inputs)
            return made[op_id]

        return value(self._site.last)
