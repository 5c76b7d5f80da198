"""The tool that measures weights, activations and gradients, and its result: a row for each tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import amanda
from amanda.action import Executions, MomentsObserver
from amanda.options import PositiveInt, Range, Share, checked
from amanda.tools.kit import OpRecord, OpTensor, Role, TensorTool, place_text, tensors_of
from amanda.tools.mapping import is_partial
from amanda.tools.results import NOTHING, Column, Result, check_schema, count_of, made_of, read_json
from amanda.tools.select import SelectOptions, select
from amanda.tools.stats._accumulator import Accumulator, Moments
from amanda.tools.stats._statistics import Bins, Sketch, Statistics

if TYPE_CHECKING:
    from typing_extensions import Unpack

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

    @property
    def is_integer(self) -> bool:
        """True for a tensor of integers or truth values, such as indices and masks."""
        return not self.dtype.startswith(("float", "bfloat", "complex", "half"))

    def quantile(self, q: float) -> float | None:
        """Return the q-quantile of the finite numbers; None without numbers or bins."""
        if self.sketch is None:
            return None
        return self.sketch.quantile(q, self.statistics.least, self.statistics.most)

    def merged(self, other: Measured) -> Measured:
        """Return the statistics of both together; without a sketch where one of them has none."""
        sketch = self.sketch.merged(other.sketch) if self.sketch and other.sketch else None
        executions, statistics = self.executions + other.executions, self.statistics.merged(other.statistics)
        return replace(self, executions=executions, sketch=sketch, statistics=statistics)


_QUANTILES = (0.01, 0.5, 0.99)


def _columns(quantiles: tuple[float, ...]) -> tuple[Column, ...]:
    """Return the columns of a table with these quantiles."""
    count = partial(Column, show="{:,}".format, number=True, folded="sum")
    number = partial(Column, show="{:.3g}".format, number=True, folded="mean")
    return (
        *map(Column, KEYS[:-1]), Column("tensor", priority=7), Column("dtype", shown=False),
        count("executions", shown=False), count("elements", priority=-1), number("mean", priority=3),
        number("std", priority=2), number("min", folded="min"), number("max", folded="max"),
        number("L1", shown=False), number("L2", priority=-1),
        *(number(f"q{q:g}", priority=-1 if quantiles == _QUANTILES else 4) for q in quantiles),
        Column("sparsity", show="{:.1%}".format, number=True, unit="share", folded="mean", priority=-1),
        count("NaN"), count("Inf"),
    )  # fmt: skip


class StatsResult(Result):
    """Statistics of weights, activations and gradients, in the order in which the ops were met.

    quantiles: those that have a column; `Measured.quantile` gives any.  chosen_quantiles: the same, none if
    these are the default ones; narrow tables keep them, and logs have them.
    """

    name: ClassVar[str] = "stats"
    title = "Statistics of tensors"
    _leading = 1

    def __init__(self, measured: Iterable[Measured], quantiles: Sequence[float] = ()) -> None:
        self.measured = tuple(measured)
        self.quantiles = tuple(quantiles)
        self.chosen_quantiles = () if self.quantiles == _QUANTILES else self.quantiles
        self.columns = _columns(self.quantiles)  # type: ignore[misc]

    def rows(self) -> Sequence[Sequence[Any]]:
        return [
            (entry.phase, entry.type, entry.module, entry.source, entry.tensor, entry.dtype, entry.executions,
             entry.statistics.elements, *_shown_numbers(entry), *map(entry.quantile, self.quantiles),
             entry.statistics.sparsity, entry.statistics.nan,
             entry.statistics.inf + entry.statistics.negative_inf)
            for entry in self.measured
        ]  # fmt: skip

    def _extremes(self) -> str:
        """Return a sentence: numbers of tensors, NaN and Inf, and the largest magnitude with its place."""
        # `NOTHING` without tensors; no magnitude without finite numbers.
        if not self.measured:
            return "No tensor was read." if self.remarks and not self.lead else NOTHING
        nan_count = sum(entry.statistics.nan for entry in self.measured)
        inf_count = sum(entry.statistics.inf + entry.statistics.negative_inf for entry in self.measured)
        counts_text = f"{count_of(len(self.measured), 'tensor')}: {nan_count:,} NaN, {inf_count:,} Inf"
        candidates = [entry for entry in self.measured if entry.statistics.count]
        # The largest index says nothing, beside numbers that were computed.
        candidates = [entry for entry in candidates if not entry.is_integer] or candidates
        if not candidates:
            return f"{counts_text}."
        entry = max(candidates, key=lambda entry: entry.statistics.largest)
        place = f"{entry.tensor} of {place_text(entry.type, entry.module, entry.phase)}"
        return f"{counts_text}; the largest magnitude is {entry.statistics.largest:.3g}, {place}."

    def _printed(self, view: Any) -> Result:
        """Return the result with floating tensors first, in every view: integers are mostly indices."""
        ordered = tuple(sorted(self.measured, key=lambda entry: entry.is_integer))
        if ordered == self.measured:
            return self
        printed = copy(self)
        printed.measured = ordered
        return printed

    def notes(self) -> Sequence[str]:
        """Return the extremes, what the numbers count, and the largest error of quantiles."""
        notes = [self._extremes(), "Statistics cover finite values only (magnitudes for complex numbers); "
                 "NaN and Inf have their own columns."]  # fmt: skip
        errors = [entry.sketch.bins.error for entry in self.measured if entry.sketch is not None]
        if errors and self.quantiles:
            notes.append(f"Quantiles are approximate (within {max(errors):.1%}).")
        return notes

    def _facts(self) -> Mapping[str, Any]:
        """Return the quantiles, and for each row the statistics that merging needs."""
        details = [
            {"statistics": entry.statistics.to_dict(), "sketch": entry.sketch and entry.sketch.to_dict()}
            for entry in self.measured
        ]
        return {"quantiles": list(self.quantiles), "kept": details}

    def merged(self, *results: StatsResult) -> StatsResult:
        """Return this and other runs or ranks as one result: tensors with equal keys are merged in order."""
        merged_by_key: dict[tuple[Any, ...], Measured] = {}
        for result in (self, *results):
            for key, entry in _with_unique_keys(result.measured):
                merged_by_key[key] = merged_by_key[key].merged(entry) if key in merged_by_key else entry
        return StatsResult(merged_by_key.values(), self.quantiles)

    @classmethod
    def load(cls, path: str | Path) -> StatsResult:
        """Read what `save` wrote as JSON; raise AmandaError for another file, or a newer version."""
        return read_json(path, "file of statistics", cls.from_dict)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> StatsResult:
        """Return the result that `to_dict` described; raise ValueError for other schemas, newer versions."""
        check_schema(content, cls.name, cls.version)
        measured = []
        for row, details in zip(content["rows"], content["kept"], strict=True):
            texts_and_count = {key: row[key] for key in (*KEYS, "dtype", "executions")}
            statistics = Statistics.from_dict(details["statistics"])
            sketch = details["sketch"] and Sketch.from_dict(details["sketch"])
            fields = {**texts_and_count, "statistics": statistics, "sketch": sketch}
            measured.append(made_of(Measured, fields))
        return cls(measured, content["quantiles"])


def _shown_numbers(entry: Measured) -> tuple[float | None, ...]:
    """Return mean, standard deviation, extremes and norms; None for each without finite numbers."""
    statistics = entry.statistics
    if not statistics.count:
        return (None,) * 6
    return statistics.mean, statistics.std, statistics.least, statistics.most, statistics.l1, statistics.l2


def _with_unique_keys(measured: Iterable[Measured]) -> Iterable[tuple[tuple[Any, ...], Measured]]:
    """Yield each entry behind its values of KEYS and the number of earlier entries with these."""
    counts = Counter[tuple[str, ...]]()
    for entry in measured:
        key = tuple(getattr(entry, name) for name in KEYS)
        yield (*key, counts[key]), entry
        counts[key] += 1


@dataclass(slots=True)
class _OpStreams(OpRecord):
    """One op, forward or backward, and the stream of each of its tensors, by a label such as "output 0"."""

    stream_by_label: dict[str, _Stream] = field(default_factory=dict)

    def read_statistics(self) -> Iterator[Measured]:
        """Yield an entry for each tensor, with the statistics so far; wait for the devices."""
        # A copy of the items: another thread may execute the op meanwhile.
        for label, stream in list(self.stream_by_label.items()):
            yield Measured(
                self.phase, self.type, self.module, self.source, tensor=stream.label_with_sizes(label),
                dtype=stream.dtype,
                executions=stream.executions + sum(observer.executions for observer in stream.observers),
                statistics=stream.accumulator.statistics(), sketch=stream.accumulator.sketch(),
            )  # fmt: skip


_BATCH = "(vmap)"  # once for each vmap around the op


@dataclass(slots=True)
class _Stream:
    """One tensor of an op over its executions."""

    accumulator: Accumulator
    dtype: str
    executions: int = 0  # that Python has measured
    batches: set[tuple[int, ...]] = field(default_factory=set)
    # One for each plan of the op, or each graph.
    observers: list[MomentsObserver | _GatheredTensors] = field(default_factory=list)

    def note_batches(self, sizes: Sequence[int]) -> None:
        """Note the sizes of the batches of a vmap; of many different sizes the least and the greatest."""
        self.batches.add(tuple(map(int, sizes)))
        if len(self.batches) > 2:
            self.batches = {min(self.batches), max(self.batches)}

    def label_with_sizes(self, label: str) -> str:
        """Return a label of the stream with the sizes of its batches, if any: "output 0 (vmap 8)"."""
        if not self.batches:
            return label
        sizes = " to ".join("x".join(map(str, size)) for size in sorted(self.batches))
        return label.replace(_BATCH * len(min(self.batches)), f"(vmap {sizes})")


class _GatheredTensors:
    """Tensors that a graph gathers; executions: how often native code has measured them; none at first.

    tensors: columns of positions among the values of a run, numbers of elements that tensors must have, -1
    for any, moments, streams, options of the observers, and places at the ops.
    """

    def __init__(self, gathered: Executions) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the tensors and the executions."""
        self.executions = 0
        self.tensors: list[Any] = []


class StatsTool(TensorTool[_OpStreams]):
    """Compute statistics of weights, activations and gradients, op by op, over all executions.

    Numbers are read from a device when `result` is read or a model is deleted; the statistics of deleted
    models are merged.  `clear` starts again.

    Args:
        weights: Measure the weights that ops read.
        activations: Measure the outputs of forward ops.
        gradients: Measure the outputs of backward ops.
        every: Measure every n-th execution of an op, beginning with the first.
        quantiles: Shares for which the result has a column.
        bins: Number of bins of the histogram from which quantiles are computed, a power of two from 256, or 0
            for none; the relative error is at most 128 / bins (3 % for 4096).
        **selection: Options of `select`, such as module="encoder".
    """

    purpose = "look"
    is_copied_when_used = False
    by_slice = True

    @staticmethod
    def log_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return options for a tool that is logged: no histogram unless one is asked for."""
        return options if {"bins", "quantiles"} & options.keys() else {**options, "bins": 0}

    @checked
    def __init__(
        self, weights: bool = True, activations: bool = True, gradients: bool = True, every: PositiveInt = 1,
        quantiles: Sequence[Share] = _QUANTILES, bins: Annotated[int, Range(0, 1 << 24)] = 4096,
        **selection: Unpack[SelectOptions],
    ) -> None:  # fmt: skip
        is_role_measured: dict[Role, bool] = {"weight": weights, "output": activations, "gradient": gradients}
        super().__init__([role for role, is_measured in is_role_measured.items() if is_measured], every)
        self._bins = Bins.of(bins) if bins else None
        self._quantiles = tuple(quantiles) if bins else ()
        # `op_gone` names a forward op; its backward ops have records of their own.
        self._backward_ids: dict[int, list[int | None]] = {}  # of the ops in `_records`
        self._deleted_by_key: dict[tuple[str, ...], Measured] = {}  # of ops of deleted models
        if amanda.interceptor.NATIVE and every == 1:
            self.wrap_routines(self._measure_natively)
        select(self, **selection)

    @property
    def result(self) -> StatsResult:
        """Return the statistics so far; wait for the devices."""
        # Ops that are gone come first: they ran before most of those that live.
        living = (entry for record in list(self._records.values()) for entry in record.read_statistics())
        result = StatsResult([*self._deleted_by_key.values(), *living], self._quantiles)
        result.remarks = self.remarks
        return result._of_tool(self)

    def clear(self) -> None:
        """Forget what was measured; what was analysed stays."""
        super().clear()
        self._deleted_by_key.clear()
        for record in self._records.values():
            for stream in record.stream_by_label.values():
                for observer in stream.observers:
                    observer.restart()
            record.stream_by_label.clear()

    def op_gone(self, op_id: int) -> None:
        """Merge the statistics of a deleted op with those of equal keys; wait for the devices."""
        for backward_id in self._backward_ids.pop(op_id, ()):
            for entry in self._records.pop((op_id, backward_id)).read_statistics():
                key = (entry.phase, entry.type, entry.module, entry.source, entry.tensor, entry.dtype)
                earlier = self._deleted_by_key.get(key)
                self._deleted_by_key[key] = entry if earlier is None else earlier.merged(entry)

    def op_record(self, context: amanda.OpContext, phase: str, kind: str) -> _OpStreams:
        """Return an op, of which nothing is measured yet."""
        self._backward_ids.setdefault(context.get_op_id(), []).append(context.get_backward_op_id())
        return _OpStreams(phase, kind, context.get_scope(), context.get_source())

    def _measure_natively(self, context: amanda.OpContext, type: amanda.ActionType, routine: Any) -> Any:
        """Return a routine that native code serves, for the executions of an eager op; else the routine."""
        is_served = context.is_eager() and routine == self._observe_execution
        return MomentsObserver(routine, self._find_moments) if is_served else routine

    def _find_moments(self, observer: MomentsObserver, values: Sequence[Any], **options: Any) -> None:
        """Set an observer's moments to those of its values' streams; not where values are lists."""
        moments: list[Any] = [None] * len(values)
        for tensor in self._tensors_of_execution(values, **options):
            if tensor.flat_index + options.get("first", 0) != tensor.position:
                return
            stream = options["record"].stream_by_label[_stream_label(tensor)]
            stream.observers.append(observer)
            moments[tensor.flat_index] = stream.accumulator.host_moments
        if options.get("is_weights"):  # a gradient of another size may be that of a weight no more
            observer.length = sum(prod(tensors_of(x).extents(x)) for x in values if x is not None)
        observer.moments = tuple(moments)

    def observe(self, record: _OpStreams, tensors: Iterator[OpTensor], execution: int) -> None:
        """Measure the tensors of an execution."""
        for accumulator, tensor in self._tensors_by_accumulator(record, tensors):
            accumulator.add(tensor)

    def observe_all(self, observed: Iterable[tuple[_OpStreams, Iterator[OpTensor], int]]) -> None:
        """Measure the tensors of executions of many ops."""
        Accumulator.add_all(
            pair for record, tensors, _ in observed for pair in self._tensors_by_accumulator(record, tensors)
        )

    def _observe_executions(self, executions: Executions) -> None:
        """Measure a batch of executions in a graph: the first time in Python, which finds the tensors."""
        gathered = executions.prepared(_GatheredTensors)
        if not gathered.tensors:
            super()._observe_executions(executions)
            if amanda.interceptor.NATIVE and self._every == 1:
                rows = []
                for position, length, _, options, tensor in self._tensors_of_batch(executions):
                    stream = options["record"].stream_by_label[_stream_label(tensor)]
                    stream.observers.append(gathered)
                    moments, place = stream.accumulator.host_moments, tensor._replace(tensor=None)
                    rows.append((position, length, moments, stream, options, place))
                gathered.tensors = [*zip(*rows, strict=True)]
            return
        gathered.executions += 1
        tensors = executions.tensors
        positions, lengths, moments, streams, options, places = gathered.tensors
        values = [tensors[i] for i in positions]
        for i in Moments.add_all(moments, tensors_of(values[0]).buffers(values), lengths):
            streams[i].executions -= 1  # which is counted anew, maybe at another stream
            left = self._tensors_of_execution([values[i]], **{**options[i], "first": places[i].position})
            flat_index = places[i].flat_index
            self.observe(options[i]["record"], (x._replace(flat_index=flat_index) for x in left), 0)

    def _tensors_by_accumulator(
        self, record: _OpStreams, tensors: Iterator[OpTensor]
    ) -> Iterator[tuple[Accumulator, Any]]:
        """Yield each tensor with the accumulator of its stream, whose executions are counted."""
        for tensor in tensors:
            label = _stream_label(tensor)
            stream = record.stream_by_label.get(label)
            if stream is None:
                stream = record.stream_by_label[label] = _Stream(Accumulator(self._bins), tensor.dtype)
            stream.executions += 1
            if tensor.batches:
                stream.note_batches(tensor.tensor.shape[: tensor.batches])
            yield stream.accumulator, tensor.tensor


def _stream_label(tensor: OpTensor) -> str:
    """Return what tells a tensor from the others of its op: "output 0 (vmap)", "weight layers.0"."""
    # A weight needs no number: an op has one.
    label = tensor.role if "weight" in tensor.role else f"{tensor.role} {tensor.flat_index}"
    # Batches of any size are one stream, which replaces these words by the sizes.
    label += f" {_BATCH * tensor.batches}" if tensor.batches else ""
    label += f" {tensor.slice}" if tensor.slice else ""
    return f"{label} (partial)" if is_partial(tensor.tensor) else label
