"""Results of interventions: the region that they change, the points of a tool, the metrics of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from amanda.errors import AmandaError
from amanda.tools.libraries import numpy as np
from amanda.tools.plots import PlottedResult
from amanda.tools.results import Column, Result, count_of, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray


class PatchError(AmandaError, ValueError, module="amanda.tools.patch"):
    """An option is not valid, a value does not fit, or nothing was selected."""


class Region(NamedTuple):
    """Token positions along an axis, and attention heads, which are equal parts of the last axis.

    positions, heads: None for all; negative numbers count from the end.  num_heads: of the last axis.
    """

    positions: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    num_heads: int | None = None
    axis: int = 1

    @classmethod
    def of(
        cls, positions: Sequence[int] | int | None, heads: Sequence[int] | int | None, num_heads: int | None,
        axis: int,
    ) -> Region:  # fmt: skip
        """Return the region of these options; raise PatchError for contradictory options.

        Args:
            positions: Indices along `axis`, or one; None for all.
            heads: Indices of heads, or one; None for all.
            num_heads: Number of equal parts of the last axis.
            axis: Axis of tokens.
        """
        region = cls(_as_tuple(positions), _as_tuple(heads), num_heads, axis)
        if region.heads is not None:
            if num_heads is None or num_heads < 1:
                raise PatchError(
                    f"heads is {heads}, num_heads is {num_heads}; give num_heads, the number of all heads"
                )
            invalid_heads = [head for head in region.heads if not -num_heads <= head < num_heads]
            if invalid_heads:
                raise PatchError(f"heads has {invalid_heads[0]}; there are {num_heads}, counted from 0")
        return region

    @property
    def is_all(self) -> bool:
        """True for a region that is the whole tensor."""
        return self.positions is None and self.heads is None

    def mask(self, shape: Sequence[int], name: str) -> NDArray[np.bool_] | None:
        """Return an array that is True in the region, to be broadcast; None if none of its positions exists.

        Args:
            shape: Shape of the tensor.
            name: Of the tensor, for errors.

        Raises:
            PatchError: For a shape without such an axis or heads.
        """
        # Extents of 1 broadcast, so the mask is as large as what is selected alone.
        mask = np.ones([1] * len(shape), bool)
        if self.positions is not None:
            positions = self._existing_positions(self.positions, shape, name)
            # A later step of `generate` has one token: positions of the prompt do not exist there.
            if not positions:
                return None
            mask = mask & _axis_mask(self.axis, shape[self.axis], positions, len(shape))
        if self.heads is not None:
            mask = mask & _axis_mask(-1, shape[-1], self._features(self.heads, shape, name), len(shape))
        return mask

    def _existing_positions(self, positions: Sequence[int], shape: Sequence[int], name: str) -> list[int]:
        """Return those positions that a shape has along the axis of tokens; raise PatchError without it."""
        if not -len(shape) <= self.axis < len(shape):
            raise PatchError(f"{name} has shape {tuple(shape)}, which lacks axis {self.axis}")
        size = shape[self.axis]
        return [position for position in positions if -size <= position < size]

    def _features(self, heads: Sequence[int], shape: Sequence[int], name: str) -> list[int]:
        """Return the indices along the last axis of the elements of heads.

        Raises PatchError if the number of heads does not divide the axis.
        """
        assert self.num_heads is not None
        # The last axis has the elements of the first head, then those of the second, and so on.
        width, remainder = divmod(shape[-1] if shape else 0, self.num_heads)
        if remainder or not width:
            raise PatchError(f"{name} has shape {tuple(shape)}; {self.num_heads} heads do not divide it")
        features: list[int] = []
        for head in heads:
            begin = (head % self.num_heads) * width  # negative heads count from the end
            features += range(begin, begin + width)
        return features


def _axis_mask(axis: int, size: int, indices: Sequence[int], rank: int) -> NDArray[np.bool_]:
    """Return a mask with True at indices of one axis, which broadcasts along the others."""
    row = np.zeros(size, bool)
    row[list(indices)] = True
    extents = [1] * rank
    extents[axis] = size
    return row.reshape(extents)


def is_value(value: Any, depth: int = 0) -> bool:
    """Return True for a number, a tensor, or lists and dicts of these, as `set`, `add` and `scale` take.

    False for truth values, tensors that hold no numbers, and what is empty or nested deeper than twice.
    """
    if isinstance(value, (Mapping, list)) and depth < 2:
        parts = list(value.values()) if isinstance(value, Mapping) else value
        return bool(parts) and all(is_value(part, depth + 1) for part in parts)
    if isinstance(value, np.generic) or not hasattr(value, "shape"):
        # A truth value is a number in Python, and most likely a mistake here.
        return isinstance(value, Real) and not isinstance(value, bool)
    return (
        getattr(value, "dtype", None) is not None
        and str(value.dtype) not in ("object", "bool")
        and not (isinstance(value, np.ndarray) and value.dtype.kind in "OUSVMmb")
    )


def _as_tuple(numbers: Sequence[int] | int | None) -> tuple[int, ...] | None:
    """Return indices as a tuple, a single index too; None for None."""
    if numbers is None:
        return None
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


class ValuesByPoint(dict[str, list[Any]]):
    """Saved tensors by point, one for each execution; its repr has their types and shapes."""

    def __repr__(self) -> str:
        points = (f"{point!r}: [{', '.join(map(_type_and_shape, values))}]" for point, values in self.items())
        return f"{{{', '.join(points)}}}"


def _type_and_shape(value: Any) -> str:
    """Return the type and shape of a tensor, such as "float32[2, 8]"; the repr of a value without a shape."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    name = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    return repr(value) if shape is None else f"{name}{list(shape)}"


@dataclass(eq=False)
class Patched:
    """One point: an input or output of a module or an op.

    executions: of the point.  changed: executions with a changed value.  skipped: selected executions in
    which none of the selected positions existed.
    """

    phase: str
    type: str
    module: str
    source: str
    point: str
    executions: int = field(default=0, init=False)
    changed: int = field(default=0, init=False)
    skipped: int = field(default=0, init=False)


class PatchResult(Result):
    """A row for each point, in the order of the first executions."""

    name: ClassVar[str] = "patch"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=44)),
        Column("source", show=partial(shortened, width=32)), Column("point"),
        Column("executions", total=True, merge="sum"), Column("changed", total=True, merge="sum"),
        Column("skipped", total=True, merge="sum"),
    )  # fmt: skip

    def __init__(self, patched: Sequence[Patched], title: str) -> None:
        self.patched, self.title = tuple(patched), title

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each point."""
        return [astuple(point) for point in self.patched]

    def notes(self) -> Sequence[str]:
        """Return a sentence on executions in which no selected position existed."""
        skipped_count = sum(point.skipped for point in self.patched)
        return (
            [f"At {count_of(skipped_count, 'execution')} no selected position existed."]
            if skipped_count
            else []
        )


class PatchSweep(PlottedResult):
    """The metric with an intervention at each place.

    Args:
        rows: Path, position or head, and metric of each place; a metric of None is an error.
        along: Second dimension of the sweep, "positions" or "heads"; None for modules only.
        baseline: The metric without an intervention.
        errors: Of places whose metric is None, by place.
    """

    name: ClassVar[str] = "patch_sweep"

    def __init__(
        self, rows: Sequence[tuple[str, int | None, float | None]], along: str | None, baseline: float,
        errors: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._rows, self._along, self.baseline = tuple(rows), along, baseline
        self.errors = dict(errors or {})
        along_columns = (Column(along.removesuffix("s"), number=True),) if along else ()
        metric_column = Column("metric", number=True, show="{:.6g}".format)
        self.columns = (Column("module"), *along_columns, metric_column)  # type: ignore[misc]
        self.title = f"Metric with an intervention; without: {baseline:.6g}"

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each place, in the order of the sweep."""
        return [row if self._along else (row[0], row[2]) for row in self._rows]

    def _facts(self) -> Mapping[str, Any]:
        """Return the metric without an intervention, the second dimension, and errors."""
        return {"baseline": self.baseline, "along": self._along, "errors": self.errors}

    def notes(self) -> Sequence[str]:
        """Return a sentence for each place without a metric."""
        return [f"No metric at {place}: {error}." for place, error in self.errors.items()]

    def draw(self, axes: Axes) -> None:
        """Draw a heat map: a row for each module, a column for each position or head, white at the baseline.

        Places without a metric stay empty.
        """
        modules = list(dict.fromkeys(row[0] for row in self._rows))
        columns = list(dict.fromkeys(row[1] for row in self._rows))
        metric_by_place = {
            (module, column): float("nan") if metric is None else metric
            for module, column, metric in self._rows
        }
        table = [[metric_by_place[module, column] for column in columns] for module in modules]
        # The same reach on both sides, so that white is the metric without an intervention.
        metrics = [metric for _, _, metric in self._rows if metric is not None]
        reach = max((abs(metric - self.baseline) for metric in metrics), default=0.0) or 1.0
        image = axes.imshow(
            table, cmap="RdBu", aspect="auto", vmin=self.baseline - reach, vmax=self.baseline + reach
        )
        axes.set_yticks(range(len(modules)), modules)
        axes.set_xticks(range(len(columns)), [str(column) if self._along else "" for column in columns])
        axes.set_xlabel(self._along.removesuffix("s") if self._along else "")
        assert axes.figure is not None
        axes.figure.colorbar(image, ax=axes, label=f"metric; white: {self.baseline:.6g}")
