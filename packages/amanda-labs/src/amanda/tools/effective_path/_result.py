"""Densities of paths: a row for each op with synapses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.effective_path._path import PARTS, EffectivePath, union
from amanda.tools.results import Column, PlottedResult, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2563eb", "#d97706", "#059669")


class EffectivePathResult(PlottedResult):
    """Paths, and the share of each op that is on them, as a mean over the paths.

    missing: types of ops at which paths end because no rule knows them, each with a source line.
    reason: why there are no paths.
    """

    name: ClassVar[str] = "effective_path"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase", shown=False), Column("type"), Column("module"),
        Column("source", show=partial(shortened, width=36)),
        *(column for part in PARTS for column in (
            Column(part, show="{:,.1f}".format, number=True, total=True),
            Column(f"all {part}", show="{:,}".format, number=True, total=True),
            Column(f"{part} density", show="{:.2%}".format, number=True, unit="share"),
        )),
    )  # fmt: skip

    def __init__(
        self, paths: Sequence[EffectivePath], theta: float, missing: Mapping[str, str], reason: str = ""
    ) -> None:
        self.paths, self.theta, self.missing = tuple(paths), theta, dict(missing)
        self.reason = reason
        self.title = f"Effective paths of {len(self.paths)} samples, theta {theta:g}"

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each layer; counts and densities are means."""
        rows = []
        for name, layer in union(self.paths).layers.items() if self.paths else ():
            layers = [path.layers[name] for path in self.paths if name in path.layers]
            row: list[Any] = ["forward", layer.type, layer.module, layer.source]
            for part, size in zip(PARTS, layer.sizes, strict=True):
                count = fmean(len(one.part(part)) for one in layers)
                row += [count, size, count / size] if size else [None, 0, None]
            rows.append(row)
        return rows

    def notes(self) -> Sequence[str]:
        """Return sentences on the ops at which paths end."""
        ends = [f"{kind} ({source})" for kind, source in self.missing.items()]
        notes = [f"Paths end at {', '.join(ends)}: no rule tells what it is made of."] if ends else []
        return [f"There is no path: {self.reason}."] if self.reason else notes

    def facts(self) -> Mapping[str, Any]:
        """Return theta, and for each path its label and its density over all layers."""
        paths = [
            {"label": path.label, **{f"{part} density": path.density(part) for part in PARTS}}
            for path in self.paths
        ]
        return {"theta": self.theta, "paths": paths, "missing": self.missing, "reason": self.reason}

    def draw(self, axes: Axes) -> None:
        """Draw bars for each layer: the share of its neurons, synapses and weights."""
        rows = self.rows()
        names = [column.name for column in self.columns]
        for i, part in enumerate(PARTS):
            at = names.index(f"{part} density")
            places = [(n + (i - 1) * 0.27, row[at]) for n, row in enumerate(rows) if row[at] is not None]
            axes.bar([x for x, _ in places], [y for _, y in places], 0.25, label=part, color=_COLOURS[i])
        labels = [f"{row[2] or row[1]} {row[1] if row[2] else ''}".strip() for row in rows]
        axes.set_xticks(range(len(rows)), labels, rotation=60, ha="right")
        axes.set_ylabel("density")
        axes.set_title(self.title, loc="left")
        axes.legend(frameon=False)
