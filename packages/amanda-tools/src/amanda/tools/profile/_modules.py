"""The profile of modules: each with its own ops, and with those of the modules in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from amanda.tools.profile._place import Place
from amanda.tools.results import Column, Result, amount, shortened

MS = 1e-6
"""Milliseconds of a nanosecond."""

milliseconds = "{:,.3f}".format
size = partial(amount, unit="B")


class ModuleResult(Result):
    """Times and bytes by module: self is what its own ops took, total includes the modules in it."""

    name: ClassVar[str] = "profile.modules"
    title = "Profile by module"
    columns: ClassVar[Sequence[Column]] = (
        Column("module", show=partial(shortened, width=60)),
        Column("calls", show="{:,}".format, number=True),
        Column("self ms", show=milliseconds, total=True, unit="ms"),
        Column("total ms", show=milliseconds, number=True, unit="ms"),
        Column("forward ms", show=milliseconds, number=True, unit="ms"),
        Column("backward ms", show=milliseconds, number=True, unit="ms"),
        Column("share", show="{:.1%}".format, number=True, unit="share"),
        Column("allocated", show=size, number=True, unit="B"),
    )

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = tuple(places)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Rows from the outermost module inwards; "" is the model, and what no module calls."""
        found: dict[str, list[Place]] = {}
        for place in self.places:
            for path in _around(place.module):
                found.setdefault(path, []).append(place)
        whole = sum(place.own for place in self.places)
        return [(path, *_of_module(path, found[path], whole)) for path in sorted(found, key=_in_order)]


def _around(module: str) -> Iterable[str]:
    """A module's path and those of the modules around it, outermost first."""
    parts = [part for part in module.replace("/", ".").split(".") if part]
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def _in_order(path: str) -> list[tuple[int, int, str]]:
    """A key that puts `layer.2` ahead of `layer.10`."""
    parts = path.split(".") if path else []
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _of_module(path: str, places: Sequence[Place], whole: int) -> tuple[Any, ...]:
    def took(*phases: str) -> int:
        return sum(place.own for place in places if not phases or place.phase in phases)

    own = sum(place.own for place in places if list(_around(place.module))[-1] == path)
    allocated = [place.allocated for place in places if place.allocated is not None]
    return (
        sum(place.calls for place in places), MS * own, MS * took(), MS * took("forward"),
        MS * took("backward"), took() / whole if whole else 0.0, sum(allocated) if allocated else None,
    )  # fmt: skip
