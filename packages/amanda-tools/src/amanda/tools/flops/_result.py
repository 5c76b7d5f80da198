"""Counts: a row for each op, or for each module, type or phase."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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

    def for_samples(self, samples: int) -> OpCost:
        """Return the cost of an execution that a vmap maps over so many samples, not executed yet or as often."""
        macs, flops = (None if n is None else n * samples for n in (self.macs, self.flops))
        return replace(
            self, macs=macs, flops=flops, bytes=self.bytes * samples, estimate=self.estimate * samples
        )


_COUNTS = (
    Column("calls", show="{:,}".format, total=True),
    Column("MACs", show=amount, total=True),
    Column("FLOPs", show=amount, total=True),
    Column("parameters", show=amount, number=True, folded="sum"),
    Column("bytes", show=partial(amount, unit="B"), total=True, unit="B"),
    Column("FLOPs/byte", show="{:.2f}".format, number=True),
)


class FlopsResult(PlacesResult[OpCost]):
    """Table of FLOPs, MACs, parameters and bytes per operator.

    places: the counts of each op.  by: the keys of a row, of `KEYS`.
    """

    name: ClassVar[str] = "flops"
    keys: ClassVar[Sequence[str]] = KEYS
    place = OpCost
    summed = ("calls",)
    order: ClassVar[str] = "FLOPs"
    counted: ClassVar[Sequence[Column]] = _COUNTS

    def __init__(self, places: Iterable[OpCost], by: Sequence[str] = KEYS) -> None:
        self.places = [place for place in places if place.calls or place.flops is None]
        self._is_warned = False
        self.tell_by(by, "FLOPs")

    def total(self, what: str = "flops", phase: str | None = None) -> int:
        """Return the sum of "macs", "flops", "bytes" or "calls", of one phase or of all.

        Calls whose cost is unknown count as 0 macs and flops: `unsupported` and `unseen` list them, and a
        warning is logged once.
        """
        if what not in ("macs", "flops", "bytes", "calls"):
            raise AmandaError(f"there are totals of macs, flops, bytes and calls, not of {what!r}")
        if what in ("macs", "flops"):
            self._warn_of_gaps()
        return self._sum(what, phase)

    def _sum(self, quantity: str, phase: str | None = None) -> int:
        places = [place for place in self.places if phase in (None, place.phase)]
        if quantity == "calls":
            return sum(place.calls for place in places)
        return sum((getattr(place, quantity) or 0) * place.calls for place in places)

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
        rows = [(*key, *_totals(places)) for key, places in self.grouped(self.places).items()]
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
            phase: {quantity: self._sum(quantity, phase) for quantity in ("macs", "flops", "bytes")}
            for phase in phases
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
        return [*notes, *self._gaps()]

    def _gaps(self) -> Sequence[str]:
        """Return sentences on what is not counted, if anything is not."""
        sentences = []
        if unsupported := self.unsupported:
            share = 100 * sum(unsupported.values()) / max(self._sum("calls"), 1)
            whose = f"{share:.1f} % of the calls, which count as 0: {_listing(unsupported)}"
            sentences.append(f"No formula, or no shapes, for {whose}.")
        if unseen := self.unseen:
            total = sum(unseen.values())
            sentences.append(f"Executions of {total} ops cannot be seen, and count as 0: {_listing(unseen)}.")
        if missing := self.missing:
            everything = self._sum("macs") + sum(missing.values())
            listed = ", ".join(f"{name} ({100 * macs / everything:.1f} %)" for name, macs in missing.items())
            sentences.append(
                f"Perhaps products, which would be so much of all MACs: {listed}. Give `formulas` for them."
            )
        return sentences

    def _warn_of_gaps(self) -> None:
        if not self._is_warned:
            self._is_warned = True
            for sentence in self._gaps():
                logger.warning("FLOPs: %s", sentence)

    @property
    def missing(self) -> Mapping[str, int]:
        """Types of ops that no formula knows and that may be products, with their MACs if they are."""
        return self._without_cost(lambda place: place.calls * place.estimate)

    def _without_cost(self, number: Callable[[OpCost], int]) -> Mapping[str, int]:
        """Return sums of a number, where there is any, by the types of ops whose cost is not known."""
        numbers = Counter[str]()
        for place in self.places:
            if place.flops is None and (count := number(place)):
                numbers[place.type] += count
        return numbers


def _listing(types: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({number})" for name, number in sorted(types.items()))


def _totals(places: Sequence[OpCost]) -> tuple[Any, ...]:
    counted = [place for place in places if place.flops is not None]
    macs = sum((place.macs or 0) * place.calls for place in counted) if counted else None
    flops = sum((place.flops or 0) * place.calls for place in counted) if counted else None
    moved = sum(place.bytes * place.calls for place in places)
    parameters = {(place.module, place.source, place.type): place.parameters for place in places}
    intensity = flops / moved if flops is not None and moved else None
    return sum(place.calls for place in places), macs, flops, sum(parameters.values()), moved, intensity
