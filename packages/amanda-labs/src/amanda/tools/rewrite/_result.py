"""The matches, with their replacements, or the reasons why they are not replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from amanda.tools.results import Column, Result, check_schema, shortened


@dataclass(frozen=True)
class Rewritten:
    """One match; phase, type, module and source are those of the replaced op.

    rule: its name.  ops: types of all ops of the match, in order.  replaced: number of executions.
    fallbacks: executions of the original instead, by reason.  obstacle: why it is never replaced, or "".
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
        """Return the reason why the match is not replaced, or sometimes was not."""
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
        return sum(not one.obstacle and rule in (None, one.rule) for one in self.matches)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each match."""
        return [
            (one.phase, one.type, one.module, one.source, one.rule, " ".join(one.ops), one.replaced,
             sum(one.fallbacks.values()), one.why)
            for one in self.matches
        ]  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return the matches."""
        return {"matches": [asdict(one) for one in self.matches]}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> RewriteResult:
        """Return the result that `to_dict` described; raise ValueError for other schemas."""
        check_schema(found, cls.name, cls.version)
        return cls([Rewritten(**{**one, "ops": tuple(one["ops"])}) for one in found["matches"]])

    def merged(self, *others: RewriteResult) -> RewriteResult:
        """Return the matches of this and other runs or ranks."""
        return RewriteResult([one for result in (self, *others) for one in result.matches])

    def notes(self) -> Sequence[str]:
        """Return the number of matches of each rule."""
        if not self.matches:
            return ["No rule's pattern was met."]
        rules = dict.fromkeys(one.rule for one in self.matches)
        told = ", ".join(f"{rule}: {self.count(rule)}" for rule in rules)
        return [f"Matches that are replaced: {told}."]
