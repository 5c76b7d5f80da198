"""Names of processes, such as "rank0" and "process123": their order, and which are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANK = re.compile(r"rank(\d+)(\.restart\d+)?")


def is_rank(label: str) -> bool:
    """Whether a process is a rank itself, not one that a rank has started."""
    return _RANK.fullmatch(label) is not None


def missing_ranks(labels: Iterable[str], ranks: int | None = None) -> list[str]:
    """Ranks without a label, of each start of the ranks: of so many, or up to the last that has one."""
    found: dict[str, set[int]] = {}
    for match in map(_RANK.fullmatch, labels):
        if match is not None:
            found.setdefault(match[2] or "", set()).add(int(match[1]))
    if ranks and not found:
        found[""] = set()
    return [
        f"rank{rank}{restart}"
        for restart, known in found.items()
        for rank in range(ranks or max(known) + 1)
        if rank not in known
    ]


def by_number(label: str) -> list[tuple[str, int]]:
    """A key for sorting, so that rank10 comes after rank2."""
    return [(letters, int(digits or 0)) for letters, digits in re.findall(r"(\D*)(\d*)", label)]
