"""Sweeps: a metric with an intervention at one place after the other, in one process or in several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from hashlib import sha256
from os import PathLike
from typing import Any

import amanda
from amanda.options import PositiveInt, checked
from amanda.tools.kit import leaves, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.patch._result import PatchError, PatchSweep, Region
from amanda.tools.patch._tool import PatchTool
from amanda.tools.trials import Progress, TrialFile, check_number, run_trials

Metric = Callable[[], Any]
Place = tuple[str, "int | None"]
"""A point, and a position or head of it."""


@checked(error=PatchError)
def patch_sweep(
    metric: Metric,
    points: Sequence[str] | str | None = None,
    *,
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    num_heads: PositiveInt | None = None,
    axis: int = 1,
    jobs: int | None = None,
    resume: str | PathLike[str] | None = None,
    progress: bool = True,
    **options: Any,
) -> PatchSweep:
    """Return the metric with an intervention at one module at a time, and at one position or head of it.

    Where the metric raises an exception, the result has the error instead.  The metric first runs without an
    intervention, in each process.

    Args:
        metric: Function that runs the model and returns a number.  For several processes it is pickled with
            all that it refers to; `trials.PerProcess` makes it in each process instead.
        points: Paths of modules, as of `PatchTool`.
        positions: Places within each module; None for the whole module.
        heads: See `positions`.
        num_heads: Number of equal parts of the last axis, for `heads`.
        axis: Axis of the positions.
        jobs: Number of processes, as joblib's `n_jobs`; the metrics are the same for any number.  None for
            one, or those of `joblib.parallel_config`.
        resume: File that keeps metrics as they are measured.  Places in the file are not measured again.
        progress: True for a progress bar on stderr, lines in a file.
        **options: Of `PatchTool`, such as `set=clean`.

    Raises:
        PatchError: If both positions and heads are given, or one of them is empty, nothing is selected, a
            value does not fit, or a metric is no number, or without an intervention another number in another
            process.
        ArtefactError: For a file of another sweep.
    """
    if positions is not None and heads is not None:
        raise PatchError("positions and heads are both given; a sweep varies one of them besides the modules")
    along = "positions" if positions is not None else "heads" if heads is not None else None
    indices: Sequence[int | None] | None = positions if positions is not None else heads
    if indices is None:
        indices = [None]
    if not len(indices):
        raise PatchError(f"{along} is {indices!r}; give at least one, or None for whole modules")
    swept_metric = _MetricWithIntervention(metric, points, along, num_heads, axis, options)
    baseline, names = swept_metric.measure_baseline()
    places = [(name, index) for name in names for index in indices]
    # A file belongs to a sweep with the same header.
    header = {
        "points": names, "along": along, "num_heads": num_heads, "axis": axis, "baseline": baseline,
        "options": {name: _option_in_file(value) for name, value in options.items()},
    }  # fmt: skip
    file = nullcontext() if resume is None else TrialFile(resume, "patch_sweep", header)
    with file as trial_file, Progress(progress) as bar:
        outcome_by_name = _measure_places(swept_metric, places, jobs, trial_file, bar)
    rows, errors = [], {}
    for place in places:
        value, error = outcome_by_name[_place_text(place)]
        rows.append((*place, value))
        if error:
            errors[_place_text(place)] = error
    return PatchSweep(rows, along, baseline, errors)


def _measure_places(
    swept_metric: _MetricWithIntervention, places: Sequence[Place], jobs: int | None, file: TrialFile | None,
    progress: Progress,
) -> Mapping[str, tuple[float | None, str]]:  # fmt: skip
    """Measure the metric at places that are not in the file, add these to the file, and show the progress.

    Returns for the name of each place the metric and "", or None and the error of the metric.
    """
    records = {} if file is None else file.records
    names = [_place_text(place) for place in places]
    # The file may be of a run with other positions or heads.
    outcome_by_name = {name: records[name] for name in names if name in records}
    remaining = [place for place, name in zip(places, names, strict=True) if name not in outcome_by_name]
    with closing(run_trials(swept_metric, remaining, jobs)) as outcomes:
        for outcome in outcomes:
            name = _place_text(outcome.trial)
            outcome_by_name[name] = outcome.value, outcome.error
            if file is not None:
                file.add(name, outcome_by_name[name])
            text = outcome.error or f"metric {outcome.value:g}"
            progress.advance(len(outcome_by_name), len(places), name, text)
    return outcome_by_name


def _place_text(place: Place) -> str:
    """Return the name of a place: a point, with a position or head in brackets."""
    name, index = place
    return name if index is None else f"{name}[{index}]"


def _option_in_file(value: Any) -> Any:
    """Return an option as a value for JSON: one digest for all tensors in it, or the option itself."""
    values = leaves([value.saved if isinstance(value, PatchTool) else value], structures=True)
    tensors = [tensor for tensor in values if hasattr(tensor, "shape")]
    if not tensors:
        return value
    digest = sha256()
    for tensor in tensors:
        digest.update(np.asarray(tensors_of(tensor).to_numpy(tensor)).tobytes())
    return digest.hexdigest()[:16]


class _MetricWithIntervention:
    """A metric with an intervention; each process calls this object for the function that measures a place.

    along: "positions" or "heads", which places have an index of; None for whole modules.
    num_heads, axis: of a region.  options: of `PatchTool`.
    """

    def __init__(
        self, metric: Metric, points: Any, along: str | None, num_heads: int | None, axis: int,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._metric, self._along, self._num_heads, self._axis = metric, along, num_heads, axis
        self._points, self._options = points, options
        self._tool = PatchTool(points, **options)
        self._baseline_and_points: tuple[float, list[str]] | None = None
        self._has_measured_baseline = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels to another process, which has a tool of its own."""
        return {**vars(self), "_tool": None, "_has_measured_baseline": False}

    def measure_baseline(self) -> tuple[float, list[str]]:
        """Run the metric without an intervention; return it with the names of the points, and keep both."""
        # No point changes while the baseline runs; the points are known afterwards.
        self._tool.only = frozenset()
        with amanda.apply(self._tool):
            baseline = check_number(self._metric(), self._metric, PatchError)
        names = [*dict.fromkeys(record.point for record in self._tool.result.patched)]
        self._baseline_and_points, self._has_measured_baseline = (baseline, names), True
        return baseline, names

    def __call__(self) -> Callable[[Place], float]:
        """Return the function that measures a place.

        In another process makes a tool and first measures the baseline; raises PatchError if it differs.
        """
        if not self._has_measured_baseline:
            assert self._baseline_and_points is not None
            expected_metric, expected_points = self._baseline_and_points
            self._tool = PatchTool(self._points, **self._options)
            metric, points = self.measure_baseline()
            # As texts: NaN is not equal to itself.
            if (repr(metric), points) != (repr(expected_metric), expected_points):
                raise PatchError(
                    f"in another process the metric without an intervention is {metric:g} at {len(points)} "
                    f"points instead of {expected_metric:g} at {len(expected_points)}; give a metric that is "
                    "the same in each process, or jobs=1"
                )
        return self._measure

    def _measure(self, place: Place) -> float:
        """Run the metric with the intervention at a place alone; raise PatchError if it is no number."""
        name, index = place
        position, head = (index, None) if self._along == "positions" else (None, index)
        # Read at each execution, so that nothing is analysed anew for each place.
        self._tool.only = frozenset([name])
        self._tool.region = Region.of(position, head, self._num_heads, self._axis)
        self._tool.clear()
        with amanda.apply(self._tool):
            return check_number(self._metric(), self._metric, PatchError)
