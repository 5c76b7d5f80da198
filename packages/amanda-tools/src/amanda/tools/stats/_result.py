"""The result of statistics: a row for each tensor of each op."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from amanda.tools.results import NOTHING, Column, Result, check_schema, made_of, read_json, shortened
from amanda.tools.stats._sketch import Sketch
from amanda.tools.stats._statistics import Statistics

KEYS = ("phase", "type", "module", "source", "tensor")


@dataclass(frozen=True)
class Measured:
    """One tensor of one op, over its executions.

    tensor: "output 0", "weight", "gradient 0", "weight gradient".  executions: those that were measured.
    sketch: None where no bins were asked for.
    """

    phase: str
    type: str
    module: str
    source: str
    tensor: str
    dtype: str
    executions: int
    statistics: Statistics
    sketch: Sketch | None

    def quantile(self, q: float) -> float | None:
        """The number below which a share q of the finite ones lies; None without numbers or bins."""
        if self.sketch is None:
            return None
        return self.sketch.quantile(q, self.statistics.least, self.statistics.most)

    def merged(self, other: Measured) -> Measured:
        """Both together."""
        both = self.sketch and other.sketch and self.sketch.merged(other.sketch)
        return replace(
            self, executions=self.executions + other.executions, sketch=both or None,
            statistics=self.statistics.merged(other.statistics),
        )  # fmt: skip


def _columns(quantiles: Sequence[float]) -> tuple[Column, ...]:
    keys = [Column(key, show=partial(shortened, width=24)) for key in KEYS]
    told = ["mean", "std", "min", "max", "L1", "L2", *(f"q{q:g}" for q in quantiles)]
    count = partial(Column, show="{:,}".format, number=True)
    return (
        *keys, Column("dtype", shown=False), count("executions", shown=False), count("elements"),
        *(Column(name, show="{:.3g}".format, number=True, shown=name != "L1") for name in told),
        Column("sparsity", show="{:.1%}".format, number=True, unit="share"), count("NaN"), count("Inf"),
    )  # fmt: skip


class StatsResult(Result):
    """Statistics of weights, activations and gradients, in the order in which the ops were met.

    quantiles: those that have a column; `Measured.quantile` gives any.
    """

    name: ClassVar[str] = "stats"
    title = "Statistics of tensors"

    def __init__(self, measured: Iterable[Measured], quantiles: Sequence[float] = ()) -> None:
        self.measured = tuple(measured)
        self.quantiles = tuple(quantiles)
        self.columns = _columns(self.quantiles)  # type: ignore[misc]

    def __iter__(self) -> Any:
        return iter(self.measured)

    def rows(self) -> Sequence[Sequence[Any]]:
        """A row for each tensor."""
        return [
            (one.phase, one.type, one.module, one.source, one.tensor, one.dtype, one.executions,
             one.statistics.elements, *_told(one), *map(one.quantile, self.quantiles),
             one.statistics.sparsity, one.statistics.nan, one.statistics.inf + one.statistics.negative_inf)
            for one in self.measured
        ]  # fmt: skip

    @property
    def leading(self) -> int:
        """The extremes come first."""
        return 1

    def _extremes(self) -> str:
        """Return the number of tensors, of NaN and Inf, and the largest magnitude with its place."""
        if not self.measured:
            return NOTHING
        told = [one.statistics for one in self.measured]
        odd = sum(one.nan for one in told), sum(one.inf + one.negative_inf for one in told)
        begin = f"{len(told):,} tensors: {odd[0]:,} NaN, {odd[1]:,} Inf"
        known = [
            (max(abs(one.statistics.least), abs(one.statistics.most)), one)
            for one in self.measured
            if one.statistics.count
        ]
        if not known:
            return f"{begin}."
        largest, one = max(known, key=lambda pair: pair[0])
        place = f"{one.tensor} of {one.type}" + f" in {one.module}" * bool(one.module)
        return f"{begin}; the largest magnitude is {largest:.3g}, {place} ({one.phase})."

    def notes(self) -> Sequence[str]:
        """Return the extremes, what the numbers count, and the largest error of quantiles."""
        notes = [
            self._extremes(),
            "Of finite numbers; of complex ones their magnitudes. NaN and Inf are counted apart.",
        ]
        errors = [one.sketch.bins.error for one in self.measured if one.sketch is not None]
        if errors and self.quantiles:
            notes.append(f"Quantiles are within {max(errors):.1%} of the numbers that they lie between.")
        return notes

    def facts(self) -> Mapping[str, Any]:
        """Quantiles, and for each row what another run can be merged with."""
        kept = [
            {"statistics": one.statistics.to_dict(), "sketch": one.sketch and one.sketch.to_dict()}
            for one in self.measured
        ]
        return {"quantiles": list(self.quantiles), "kept": kept}

    def merged(self, *others: StatsResult) -> StatsResult:
        """This and other runs or ranks as one: what has the same keys, in the same order, is put together."""
        together: dict[tuple[Any, ...], Measured] = {}
        for result in (self, *others):
            for key, one in _keyed(result.measured):
                together[key] = together[key].merged(one) if key in together else one
        return StatsResult(together.values(), self.quantiles)

    @classmethod
    def load(cls, path: str | Path) -> StatsResult:
        """Read what `save` wrote as JSON.

        Raises AmandaError for a file of another kind or of a newer version.
        """
        return read_json(path, "file of statistics", cls.from_dict)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> StatsResult:
        """Return the result that `to_dict` described; raise ValueError for other schemas, newer versions."""
        check_schema(found, cls.name, cls.version)
        measured = [
            made_of(
                Measured,
                {
                    **{key: row[key] for key in (*KEYS, "dtype", "executions")},
                    "statistics": Statistics.from_dict(kept["statistics"]),
                    "sketch": kept["sketch"] and Sketch.from_dict(kept["sketch"]),
                },
            )
            for row, kept in zip(found["rows"], found["kept"], strict=True)
        ]
        return cls(measured, found["quantiles"])


def _told(one: Measured) -> tuple[float | None, ...]:
    told = one.statistics
    if not told.count:
        return (None,) * 6
    return told.mean, told.std, told.least, told.most, told.l1, told.l2


def _keyed(measured: Iterable[Measured]) -> Iterable[tuple[tuple[Any, ...], Measured]]:
    """Each with its keys and how many before it had the same."""
    seen: dict[tuple[str, ...], int] = {}
    for one in measured:
        key = tuple(getattr(one, name) for name in KEYS)
        seen[key] = seen.get(key, -1) + 1
        yield (*key, seen[key]), one
