"""Counts: a row for each op, or for each module, type or phase."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from amanda.errors import AmandaError
from amanda.tools.results import NOTHING, Column, PlacesResult, amount

logger = logging.getLogger("amanda")

KEYS = ("phase", "type", "module", "source")


@dataclass
class OpCost:
    """One op, forward or backward, with shapes that stayed the same.

    calls: how often it was executed; 0 where that cannot be seen.  macs, flops: of one execution; None where
    no formula knows, or shapes are not known even as it runs.
    parameters: elements of the parameters that it reads.  bytes: of the tensors that it reads and writes.
    estimate: where no formula knows, the MACs of one execution if the op is a product of its largest inputs.
    """

    phase: str
    type: str
    module: str
    source: str
    calls: int = 0
    macs: int | None = 0
    flops: int | None = 0
    parameters: int = 0
    bytes: int = 0
    estimate: int = 0


_columns = (
    Column("calls", show="{:,}".format, total=True),
    Column("MACs", show=amount, total=True),
    Column("FLOPs", show=amount, total=True),
    Column("parameters", show=amount, number=True, folded="sum"),
    Column("bytes", show=partial(amount, unit="B"), total=True, unit="B"),
    Column("FLOPs/byte", show="{:.2f}".format, number=True),
)


class FlopsResult(PlacesResult[OpCost]):
    """FLOPs and their like of everything that was executed.

    places: what was counted, each op apart.  by: the keys of a row, of `KEYS`.
    """

    name: ClassVar[str] = "flops"
    keys: ClassVar[Sequence[str]] = KEYS
    place = OpCost
    summed = ("calls",)
    order: ClassVar[str] = "FLOPs"
    counted: ClassVar[Sequence[Column]] = _columns

    def __init__(self, places: Iterable[OpCost], by: Sequence[str] = KEYS) -> None:
        self.places = [place for place in places if place.calls or place.flops is None]
        self._is_told = False
        self.tell_by(by, "FLOPs")

    def total(self, what: str = "flops", phase: str | None = None) -> int:
        """Return the sum of "macs", "flops", "bytes" or "calls", of one phase or of all.

        Calls whose cost is not known count as 0 macs and flops: `unsupported` and `unseen` have them, and a
        warning is logged once.
        """
        if what not in ("macs", "flops", "bytes", "calls"):
            raise AmandaError(f"there are totals of macs, flops, bytes and calls, not of {what!r}")
        if what in ("macs", "flops"):
            self._tell_missing()
        return self._sum(what, phase)

    def _sum(self, what: str, phase: str | None = None) -> int:
        chosen = [place for place in self.places if phase in (None, place.phase)]
        return sum((1 if what == "calls" else getattr(place, what) or 0) * place.calls for place in chosen)

    @property
    def unsupported(self) -> Mapping[str, int]:
        """Types of ops whose cost is not known, with their calls: no formula knows them, or their shapes."""
        return self._without_cost(lambda place: place.calls)

    @property
    def unseen(self) -> Mapping[str, int]:
        """Types of ops whose executions cannot be seen, as in ONNX' control flow, with their number."""
        return Counter(place.type for place in self.places if not place.calls)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return rows by their keys, those with most FLOPs first."""
        rows = [(*key, *_sums(places)) for key, places in self.grouped(self.places).items()]
        flops = len(self._by) + 2
        return sorted(rows, key=lambda row: -(row[flops] or 0))

    @property
    def leading(self) -> int:
        """The totals come first."""
        return 1

    def facts(self) -> Mapping[str, Any]:
        """Totals, what was not counted, and each op."""
        phases = dict.fromkeys(place.phase for place in self.places)
        totals = {
            phase: {what: self._sum(what, phase) for what in ("macs", "flops", "bytes")} for phase in phases
        }
        return {"totals": totals, "unsupported": dict(self.unsupported), **super().facts()}

    def notes(self) -> Sequence[str]:
        """Return the totals, the convention, and the share of what no formula knows."""
        if not self.places:
            return [NOTHING]
        phases = dict.fromkeys(place.phase for place in self.places)
        parts = ", ".join(f"{phase} {amount(self._sum('flops', phase))}" for phase in phases)
        totals = ", ".join([f"{amount(self._sum('macs'))} MACs", f"{self._sum('calls'):,} calls"])
        within = f" ({parts})" if len(phases) > 1 else ""
        notes = [f"{amount(self._sum('flops'))} FLOPs{within}, {totals}."]
        notes += ["A multiply-accumulate (MAC) of a convolution, matrix product or attention is two FLOPs."]
        return [*notes, *self._missing()]

    def _missing(self) -> Sequence[str]:
        """Return sentences on what is not counted, if anything is not."""
        told = []
        if unsupported := self.unsupported:
            share = 100 * sum(unsupported.values()) / max(self._sum("calls"), 1)
            whose = f"{share:.1f} % of the calls, which count as 0: {_listed(unsupported)}"
            told.append(f"No formula, or no shapes, for {whose}.")
        if unseen := self.unseen:
            told.append(
                f"Executions of {sum(unseen.values())} ops cannot be seen, and count as 0: {_listed(unseen)}."
            )
        if missing := self.missing:
            everything = self._sum("macs") + sum(missing.values())
            listed = ", ".join(f"{name} ({100 * macs / everything:.1f} %)" for name, macs in missing.items())
            told.append(
                f"Perhaps products, which would be so much of all MACs: {listed}. Give `formulas` for them."
            )
        return told

    def _tell_missing(self) -> None:
        if not self._is_told:
            self._is_told = True
            for sentence in self._missing():
                logger.warning("FLOPs: %s", sentence)

    @property
    def missing(self) -> Mapping[str, int]:
        """Types of ops that no formula knows and that may be products, with their MACs if they are."""
        return self._without_cost(lambda place: place.calls * place.estimate)

    def _without_cost(self, number: Callable[[OpCost], int]) -> Mapping[str, int]:
        """Return sums of a number, where there is any, by the types of ops whose cost is not known."""
        found = Counter[str]()
        for place in self.places:
            if place.flops is None and (count := number(place)):
                found[place.type] += count
        return found


def _listed(types: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({number})" for name, number in sorted(types.items()))


def _sums(places: Sequence[OpCost]) -> tuple[Any, ...]:
    known = [place for place in places if place.flops is not None]
    macs = sum((place.macs or 0) * place.calls for place in known) if known else None
    flops = sum((place.flops or 0) * place.calls for place in known) if known else None
    moved = sum(place.bytes * place.calls for place in places)
    held = {(place.module, place.source, place.type): place.parameters for place in places}
    intensity = flops / moved if flops is not None and moved else None
    return sum(place.calls for place in places), macs, flops, sum(held.values()), moved, intensity
