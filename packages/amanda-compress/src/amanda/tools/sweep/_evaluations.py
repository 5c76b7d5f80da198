"""The evaluations of a sweep, in this process or in a worker, and their records, which a file keeps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isclose, isfinite
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import amanda
from amanda.action import ActionType, Routine, routine_name
from amanda.errors import ArtefactError
from amanda.tools.mapping import StandardMapping
from amanda.tools.sweep._result import ALL, Site, SweepError
from amanda.tools.trials import TrialFile, check_number

Level = TypeVar("Level", int, float)
Prepare = Callable[[Any], None]


class Measurement(NamedTuple):
    """The metric of an evaluation.  cost: None without a function that measures it."""

    metric: float
    cost: float | None


class SweepProgram(Generic[Level]):
    """Evaluates the program of a sweep with tools; a pickled copy does so in a worker.

    An architecture has the text of a level by the name of an op; {} is the program without a tool.
    cost: function that measures the cost, or None.  names: of the metric and of the cost.
    """

    def __init__(
        self,
        evaluate: Callable[[], Any],
        make: Callable[[Level], amanda.Tool],
        levels: Sequence[Level],
        prepare: Prepare | None,
        cost: Callable[..., Any] | None,
        names: tuple[str, str],
        compiled: Literal["eager", "instrument"],
    ) -> None:
        self.make: Callable[[Level], amanda.Tool] = make
        self.levels: dict[str, Level] = {f"{level:g}": level for level in levels}
        """The levels by their text in architectures."""
        self.sites: dict[str, Site] = {}
        self.dense: float | None = None
        self._evaluate, self._prepare, self._cost = evaluate, prepare, cost
        self._metric_name, self._cost_name = names
        self._compiled: Literal["eager", "instrument"] = compiled
        self._report = amanda.Report()
        # Names of places are the same for each new tool of a level, so that points are found again.
        self._place_namer = amanda.Tool()
        self._ops_met: set[str] = set()
        self._is_in_worker = False

    def __getstate__(self) -> dict[str, Any]:
        # A worker names ops anew. With the report it does not log again what this process has logged.
        return {**vars(self), "sites": {}, "_place_namer": amanda.Tool(), "_is_in_worker": True}

    def load(self) -> Callable[[Mapping[str, str]], Measurement]:
        """Return `measure`; in a worker, evaluate without a tool and raise SweepError if that differs."""
        if self._is_in_worker:
            metric, dense = self.measure_dense().metric, self.dense
            if dense is None or not is_same(metric, dense):
                raise SweepError(
                    f"{self._metric_name} without a tool is {metric} in a worker, and {dense} in the process "
                    "that sweeps; the model and its data have to be the same in each process, as from a file "
                    "or a seed; a module whose model has changed is sent by "
                    "cloudpickle.register_pickle_by_value(module)"
                )
        return self.measure

    def measure_dense(self, *recorders: amanda.Tool) -> Measurement:
        """Evaluate without a tool; recorders see the ops.  Raises SweepError unless the metric is finite."""
        with self._scope(*recorders):
            metric = check_number(self._evaluate(), self._evaluate, SweepError)
            measurement = Measurement(metric, self._measured_cost())
        # All drops would be NaN.
        if not isfinite(metric):
            raise SweepError(f"{self._metric_name} is {metric} without a tool: nothing compares with it")
        return measurement

    def measure_all_ops(self, level: Level) -> Measurement:
        """Evaluate with a tool at all ops, which become sites."""
        tool = self._make_tool(level)
        # Only the tool knows where it acts: ops at which it inserts no routine are not sites.
        tool.wrap_routines(self._record_site)
        return self._measure_with(tool)

    def measure(self, architecture: Mapping[str, str]) -> Measurement:
        """Evaluate with tools at the ops of an architecture, which has the text of a level for each.

        Raises RuntimeError if one of these ops did not run, and exceptions of the program.
        """
        self._ops_met.clear()
        measurement = self._measure_with(*self.tools(architecture))
        for name, label in architecture.items():
            if label in self.levels and name not in self._ops_met:
                raise RuntimeError(f"the evaluation did not run {name}, which another evaluation has run")
        return measurement

    def tools(self, architecture: Mapping[str, str]) -> list[amanda.Tool]:
        """Return new tools for an architecture: for each level one that acts at the ops with this level."""
        tools = []
        for label, level in self.levels.items():
            names = {name for name, op_label in architecture.items() if op_label == label}
            tools += [self._make_tool(level, names)] if names else []
        return tools

    def _measure_with(self, *tools: amanda.Tool) -> Measurement:
        """Evaluate in a scope of tools, each prepared.

        Raises SweepError unless the metric is a number, and ValueError unless it is finite.
        """
        with self._scope(*tools):
            for tool in tools:
                if self._prepare is not None:
                    self._prepare(tool)
            metric = check_number(self._evaluate(), self._evaluate, SweepError, self._metric_name)
            return Measurement(metric, self._measured_cost(*tools))

    def _measured_cost(self, *tools: amanda.Tool) -> float | None:
        """Return the number that the cost function returns for tools; None without a function.

        Raises as `_measure_with` does.
        """
        if self._cost is None:
            return None
        return check_number(self._cost(*tools), self._cost, SweepError, self._cost_name)

    def _scope(self, *tools: amanda.Tool) -> amanda.Scope:
        """Return a scope that shares the report of the sweep, so that each warning is logged once."""
        scope = amanda.apply(*tools, compiled=self._compiled)
        # A warning about an op would come once for each point otherwise.
        scope.report = self._report
        return scope

    def _make_tool(self, level: Level, names: set[str] | None = None) -> amanda.Tool:
        """Make a tool of a level that acts at the named ops; None: at all ops."""
        tool = self.make(level)
        # For the types of ops in sites.
        tool.depends_on(StandardMapping())

        def admits(context: amanda.OpContext) -> bool:
            """Return True if the tool may act at an op; record that the op was met."""
            # Every op gets its name here, also where no tool acts: names count equal ops of a module, and a
            # worker that never has the tool at all ops has to count alike.
            name = self._place_namer.place(context)
            self._ops_met.add(name)
            return names is None or name in names

        tool.restrict(admits)
        return tool

    def _record_site(self, context: amanda.OpContext, type: ActionType, routine: Routine) -> Routine:
        """Record the op at which the tool acts as a site; return the routine unchanged."""
        name = self._place_namer.place(context)
        if name not in self.sites:
            self.sites[name] = Site(name, context["type"], context.get_scope(), context.get_source())
        self.sites[name].op_ids.add(context.get_op_id())
        return routine


def is_same(metric: float, other: float) -> bool:
    """Return True if two metrics of one program are equal, up to what another processor rounds otherwise."""
    return isclose(metric, other, rel_tol=1e-5)


class Record(NamedTuple):
    """One evaluation.  metric: None after an error.  cost: None without a function that measures it."""

    metric: float | None
    error: str
    seconds: float
    cost: float | None


def record_key(architecture: Mapping[str, str]) -> str:
    """Return the key of an architecture, the same in any order of its ops."""
    return json.dumps(architecture, sort_keys=True)


def option_words(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of tools as JSON has them, equal in each process: a function by its name and line."""
    return {name: _option_word(option) for name, option in options.items()}


def _option_word(option: Any) -> Any:
    """Return a number, a text or None as it is, lists and sets of these as a list, else a name."""
    if isinstance(option, (list, tuple, set, frozenset)):
        words = [_option_word(element) for element in option]
        return words if isinstance(option, (list, tuple)) else sorted(words, key=repr)
    if option is None or isinstance(option, (str, bool, int, float)):
        return option
    # The repr of an object may have its address.
    return routine_name(option) if callable(option) else type(option).__name__


class SweepRecords:
    """The record of each evaluation by its key, and the file that keeps them, if any."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._file: TrialFile | None = None

    def get(self, architecture: Mapping[str, str]) -> Record | None:
        """Return the record of an architecture; None if it was not evaluated."""
        return self._records.get(record_key(architecture))

    def is_due(self, architecture: Mapping[str, str], attempt: int) -> bool:
        """Return True if an architecture was never evaluated, or failed and this is a further attempt."""
        record = self.get(architecture)
        return record is None or (attempt > 0 and bool(record.error))

    def add(self, architecture: Mapping[str, str], record: Record) -> None:
        """Add the record of an evaluation that ended; raise ArtefactError if the file has another metric."""
        key = record_key(architecture)
        if self._file is not None:
            self._write(self._file, key, record)
        self._records[key] = record

    @contextmanager
    def write_to(self, path: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> Iterator[None]:
        """Read the records of a file, and write those of evaluations within this context; None: no file.

        Of the file, evaluations without a tool and at all ops are not taken.
        Raises ArtefactError for a file of another sweep.
        """
        if path is None:
            yield
            return
        with TrialFile(path, "sweep", options) as file:
            try:
                file_records = {key: Record(**record) for key, record in file.records.items()}
                architectures = {key: dict(json.loads(key)) for key in file_records}
            except (TypeError, ValueError) as error:
                raise ArtefactError(f"{path} is no file of a sweep: {error}") from error
            for key, record in self._records.items():
                self._write(file, key, record)
            for key, record in file_records.items():
                architecture = architectures[key]
                # Evaluations without a tool, and at all ops, find the ops: each process runs them itself.
                if architecture and ALL.name not in architecture:
                    self._records.setdefault(key, record)
            self._file = file
            try:
                yield
            finally:
                self._file = None

    def _write(self, file: TrialFile, key: str, record: Record) -> None:
        """Write a record, unless the file has it; raise ArtefactError if the file has another metric."""
        earlier_record = None if key not in file.records else Record(**file.records[key])
        if earlier_record is None or earlier_record.metric is None:
            file.add(key, record._asdict())
        elif record.metric is not None and not is_same(record.metric, earlier_record.metric):
            raise ArtefactError(
                f"{file.path} is of another model, other data or other options: at {json.loads(key)} it has "
                f"{earlier_record.metric}, and this sweep {record.metric}; give another file"
            )
