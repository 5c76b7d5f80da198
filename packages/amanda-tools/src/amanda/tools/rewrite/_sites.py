"""The matches that are replaced: of those that overlap the earliest, then the longest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from amanda.tools.rewrite._match import Site, find
from amanda.tools.rewrite._pattern import Rule
from amanda.tools.rewrite._program import Node, Program

_FORM_READERS = frozenset({"size", "dim", "numel", "Shape", "ShapeN", "Size", "Rank"})


class Sites:
    """The places where patterns are, and what each op is there for."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._sites: dict[tuple[str, tuple[int, ...]], Site] = {}
        self._roles: dict[int, Site] = {}

    def __iter__(self) -> Iterator[Site]:
        return iter(sorted(self._sites.values(), key=lambda site: site.order))

    def role(self, op_id: int) -> Site | None:
        """The match that is replaced and has an op."""
        return self._roles.get(op_id)

    def add(self, last: Node, program: Program) -> None:
        """Look for patterns that end with an op."""
        for rank, rule in enumerate(self._rules):
            found = find(rule, last, program.nodes)
            if found is None:
                continue
            nodes = sorted((program.nodes[one] for one in found.ops.values()), key=lambda node: node.order)
            others = [node.id for node in nodes if node is not last]
            order = nodes[0].order, -len(nodes), rank
            site = Site(rule, found, (*others, last.id), order)
            self._sites.setdefault(site.key, site)

    def decide(self, nodes: Mapping[int, Node]) -> set[int]:
        """Decide which matches are replaced; return the ids of ops whose role has changed."""
        roles: dict[int, Site] = {}
        for site in self:
            site.obstacle = site.broken or _obstacle(site, nodes)
            overlapping = next((roles[one] for one in site.members if one in roles), None)
            if overlapping is not None and not site.obstacle:
                site.obstacle = f"it overlaps with {overlapping.rule.name}, which begins earlier or is longer"
            if not site.obstacle:
                roles |= dict.fromkeys(site.members, site)
        before, self._roles = self._roles, roles
        return {one for one in before.keys() | roles if before.get(one) is not roles.get(one)}


def _obstacle(site: Site, nodes: Mapping[int, Node]) -> str:
    """Return why the ops of a match cannot be replaced as one."""
    for one in site.members if len(site.members) > 1 else ():
        node = nodes[one]
        if node.in_place:
            return f"{node.name} writes in place"
        readers = node.readers.difference(site.members) if one != site.last else ()
        for reader in (nodes[index] for index in readers):
            if reader.type not in _FORM_READERS:
                return f"what {node.type} makes is read by {reader.type}, {reader.source}"
    return ""
