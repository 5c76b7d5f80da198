"""The profile of modules: the ops of each, without and with those of the modules in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from amanda.tools.profile._op import OpProfile, together
from amanda.tools.results import Column, Result, amount, shortened

MS = 1e-6
"""Milliseconds of a nanosecond."""

milliseconds = "{:,.3f}".format
size = partial(amount, unit="B")


class ModuleResult(Result):
    """Times and bytes by module: self is the time of its own ops, total includes the modules in it."""

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

    def __init__(self, places: Sequence[OpProfile]) -> None:
        self.places = tuple(places)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return rows from the outermost module inwards; "" is the model, with ops that no module calls."""
        inside: dict[str, list[OpProfile]] = {}
        own: dict[str, list[OpProfile]] = {}
        for place in self.places:
            for path in (paths := _around(place.module)):
                inside.setdefault(path, []).append(place)
            own.setdefault(paths[-1], []).append(place)
        whole, rows = _took(self.places), []
        for path in sorted(inside, key=_in_order):
            places, took = inside[path], _took(inside[path])
            every = together(places)
            rows.append((
                path, every.calls, MS * _took(own.get(path, ())), MS * took, MS * _took(places, "forward"),
                MS * _took(places, "backward"), took / whole if whole else 0.0, every.allocated,
            ))  # fmt: skip
        return rows


def _took(places: Iterable[OpProfile], phase: str | None = None) -> int:
    return sum(place.own for place in places if phase in (None, place.phase))


def _around(module: str) -> Sequence[str]:
    """Return a module's path and those of the modules around it, outermost first."""
    parts = [part for part in module.replace("/", ".").split(".") if part]
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]


def _in_order(path: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts `layer.2` before `layer.10`."""
    parts = path.split(".") if path else []
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
