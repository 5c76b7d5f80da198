"""Writers of named numbers by step: JSON lines, TensorBoard, MLflow, Weights & Biases, OpenTelemetry."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TextIO

from amanda.errors import AmandaError, FileError
from amanda.files import check_file_to_write, check_folder_to_write, naming, write_file
from amanda.options import Name, checked
from amanda.tools.results import to_json


class LiveError(AmandaError, ValueError, module="amanda.tools.live"):
    """A tool cannot be logged, or a library that a writer needs is not installed."""


class ScalarWriter(Protocol):
    """A place for the numbers of steps.

    A writer that has a method `begin` is told the run's first step before the first numbers; what it has of
    this step and later ones is of an earlier run.  One that has a method `close` is closed with the scope.
    """

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step.

        Args:
            step: Number of the step, which increases from call to call.
            values: Numbers by name.
        """


def begin_run(writer: Any, step: int) -> None:
    """Call a writer's `begin` with the first step of a run, if it has that method."""
    if callable(method := getattr(writer, "begin", None)):
        method(step)


def _check_installed(writer: str, *modules: str) -> None:
    """Raise LiveError, with the command that installs it, for a writer none of whose modules is there."""
    if not any(map(_is_installed, modules)):
        library = modules[0]
        package = _PACKAGES.get(library, library)
        raise LiveError(f"{writer} needs {library}, which is not installed: pip install {package}")


def _is_installed(module: str) -> bool:
    return module in sys.modules or find_spec(module) is not None


_PACKAGES = {"mlflow": "mlflow-skinny", "opentelemetry": "opentelemetry-sdk"}
"""Packages of PyPI with another name than the module."""


class JSONLinesWriter:
    """Write a JSON object for each call into a file: `{"step": 50, "stats/0.linear/output 0 mean": 0.1}`.

    A line is in the file when `scalars` returns, so a killed process loses none.  Lines of an earlier process
    are dropped from the run's first step on: those that a resumed run computes again, and all if a run begins
    anew.

    Args:
        file: File to which lines are appended.
    """

    @checked
    def __init__(self, file: str | Path) -> None:
        self.file = Path(file).absolute()
        check_file_to_write(self.file)
        self._lines_and_steps()  # now, not after hours of training
        self._stream: TextIO | None = None
        self._has_dropped_lines = False

    def begin(self, step: int) -> None:
        """Drop the lines of an earlier process from the first step of this run on."""
        if not self._has_dropped_lines:
            self._drop_later_lines(step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line with the step and the numbers; NaN and infinities are words, as in results.

        Without a call of `begin`, the run's first step is that of the first call.
        """
        self.begin(step)
        if self._stream is None:
            with naming(self.file):
                self._stream = self.file.open("a", encoding="utf-8")
        self._stream.write(to_json({"step": step, **values}) + "\n")
        self._stream.flush()

    def _drop_later_lines(self, step: int) -> None:
        """Drop the file's lines from a step on, and a line that a killed process left unfinished."""
        lines_and_steps = self._lines_and_steps()
        earlier_lines = [line for line, number in lines_and_steps if number is not None and number < step]
        if len(earlier_lines) < len(lines_and_steps):
            write_file(self.file, "".join(earlier_lines))
        self._has_dropped_lines = True

    def _lines_and_steps(self) -> list[tuple[str, int | None]]:
        """Return the lines of the file with their steps; None for a last line that is unfinished.

        Raises FileError for a file of something else.
        """
        if not self.file.is_file():
            return []
        with naming(self.file, "read"):
            text = self.file.read_text("utf-8", "replace")
        lines = [(line, _step_of(line)) for line in text.splitlines(keepends=True)]
        if any(number is None and not _is_unfinished(line) for line, number in lines):
            raise FileError(f"{self.file} has lines that are no steps; give a file of its own")
        return lines

    def close(self) -> None:
        """Close the file; a later call of `scalars` opens it again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def __str__(self) -> str:
        return str(self.file)


_LINE_START = '{"step": '


def _is_unfinished(line: str) -> bool:
    """Return True for the last line of a process that was killed as it wrote."""
    return not line.endswith("\n") and line.startswith(_LINE_START[: len(line)])


def _step_of(line: str) -> int | None:
    """Return the step of a line; None for a line that is no object with a step, or has no end."""
    with suppress(ValueError, KeyError, TypeError):
        step = json.loads(line)["step"]
        if line.endswith("\n") and isinstance(step, int):
            return step
    return None


class TensorBoardWriter:
    """Write files of events for TensorBoard, by torch.utils.tensorboard or, without PyTorch, by tf.summary.

    Args:
        folder: For the files, of this writer alone: of earlier files there, TensorBoard drops the steps from
            the first one of the run on.  None for a new folder in `runs`.

    Raises:
        LiveError: Without the libraries.
        FileError: For a folder that cannot be written.
    """

    @checked
    def __init__(self, folder: str | Path | None = None) -> None:
        # PyTorch has the writer, the package tensorboard the format.
        _check_installed("TensorBoardWriter", "tensorboard", "tensorflow")
        now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.folder = Path("runs", now).absolute() if folder is None else Path(folder).absolute()
        check_folder_to_write(self.folder)
        self._writer: Any = None
        self._was_open = False

    def begin(self, step: int) -> None:
        """Begin a file, which drops the steps of an earlier process from the first step of this run on."""
        if self._writer is None:
            self._open(step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write an event for each number; without a call of `begin`, this is the run's first step."""
        self.begin(step)
        self._writer.add(step, values)

    def _open(self, step: int) -> None:
        """Begin a file; with files of an earlier process there, also a mark that drops their later steps."""
        has_earlier_files = not self._was_open and any(self.folder.glob(f"*{_SUFFIX}"))
        events_class = _TorchEvents if _has_torch_writer() else _TensorFlowEvents
        self._writer = events_class(str(self.folder), step if has_earlier_files else None)
        self._was_open = True

    def close(self) -> None:
        """Close the file; a later call of `scalars` begins another one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __str__(self) -> str:
        return str(self.folder)


_SUFFIX = ".amanda"
"""End of the names of the files, which tells them from files of other writers."""


def _has_torch_writer() -> bool:
    """Return True if PyTorch writes the events: the program has imported it, or lacks TensorFlow."""
    # The writer must not be what imports a framework into a program of the other one.
    if find_spec("tensorboard") is None or find_spec("torch") is None:
        return False
    return "torch" in sys.modules or "tensorflow" not in sys.modules


class _TorchEvents:
    """A file of events that torch.utils.tensorboard writes; purge: the step from which others are dropped."""

    def __init__(self, folder: str, purge: int | None) -> None:
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(folder, purge_step=purge, filename_suffix=_SUFFIX)
        self.close = self._writer.close

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # Whoever watches reads now, not in the two minutes after which the writer would flush.
        self._writer.flush()


class _TensorFlowEvents:
    """A file of events that TensorFlow writes; purge: the step from which others are dropped."""

    _numbers = count()

    def __init__(self, folder: str, purge: int | None) -> None:
        tensorflow: Any = import_module("tensorflow")
        self._v1 = tensorflow.compat.v1
        # That of version 2 writes by ops, and has no mark that drops steps; this one takes no eager mode.
        with tensorflow.Graph().as_default():
            # TensorFlow names files by the second, and a writer that closes may open again within it.
            suffix = f".{os.getpid()}.{next(self._numbers)}{_SUFFIX}"
            self._writer = self._v1.summary.FileWriter(folder, filename_suffix=suffix)
        self.close = self._writer.close
        if purge is not None:
            start = self._v1.SessionLog(status=self._v1.SessionLog.START)
            self._writer.add_session_log(start, purge)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        value = [self._v1.Summary.Value(tag=name, simple_value=number) for name, number in values.items()]
        self._writer.add_summary(self._v1.Summary(value=value), step)
        self._writer.flush()


class MLflowWriter:
    """Log metrics to a run of MLflow: the active run, else one that is started, and ended by `close`.

    A run that is resumed keeps the steps that it has; these are left out.

    Args:
        experiment: Name of the experiment of a new run.
        run_id: The run to resume.

    Raises:
        LiveError: Without mlflow.
    """

    @checked
    def __init__(self, experiment: Name | None = None, run_id: Name | None = None) -> None:
        _check_installed("MLflowWriter", "mlflow")
        self._experiment, self._run_id = experiment, run_id
        self._run: Any = None
        self._was_started = False
        self._last_earlier_step: int | None = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers as metrics, unless an earlier run logged this step or a later one to the run.

        Characters of names that MLflow refuses become "_".
        """
        mlflow = import_module("mlflow")
        metrics = {re.sub(r"[^\w\-./ ]", "_", name): value for name, value in values.items()}
        if self._run is None:
            self._open(mlflow)
        if self._last_earlier_step is None:
            history = mlflow.MlflowClient().get_metric_history(self._run_id, next(iter(metrics)))
            self._last_earlier_step = max((metric.step for metric in history), default=-1)
        if step > self._last_earlier_step:
            mlflow.log_metrics(metrics, step=step, run_id=self._run.info.run_id)

    def _open(self, mlflow: Any) -> None:
        """Take the active run if it is the one to log to; else start a run, or continue it."""
        self._run, self._was_started = mlflow.active_run(), False
        if self._run is None or (self._run_id and self._run.info.run_id != self._run_id):
            if self._experiment is not None and self._run_id is None:
                mlflow.set_experiment(self._experiment)
            self._run = mlflow.start_run(run_id=self._run_id, nested=self._run is not None)
            self._was_started = True  # so that `close` ends the run
        # Reopened by this process, the run is the same one.
        self._run_id = self._run.info.run_id

    def close(self) -> None:
        """End the run, if `scalars` has started it; a later call resumes it."""
        if self._was_started:
            import_module("mlflow").end_run()
        self._run, self._was_started = None, False

    def __str__(self) -> str:
        return f"run {self._run_id} of MLflow" if self._run_id else "MLflow"


class WandbWriter:
    """Log to a run of Weights & Biases: the present run, else one that is started, and finished by `close`.

    A run that is resumed keeps the steps that it has; these are left out.

    Args:
        project: Of a new run.
        **settings: Further arguments of `wandb.init`, such as `mode="offline"`, or `id` and `resume` of a run
            to resume.  The numbers have an axis of their own, "amanda/step".

    Raises:
        LiveError: Without wandb.
    """

    @checked
    def __init__(self, project: Name | None = None, **settings: Any) -> None:
        _check_installed("WandbWriter", "wandb")
        self._settings = {"project": project, **settings}
        self._run: Any = None
        self._was_started = False
        self._last_earlier_step: int | None = None
        self._place = ""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers under the step, unless an earlier process logged it or a later one to the run."""
        if self._run is None:
            self._open()
        if self._last_earlier_step is not None and step <= self._last_earlier_step:
            return
        # The run's own counter grows at each call of anybody, and takes no smaller step.
        for group in {name.partition("/")[0] for name in values} - self._defined_groups:
            self._run.define_metric(f"{group}/*", step_metric=_WANDB_STEP)
            self._defined_groups.add(group)
        self._run.log({**values, _WANDB_STEP: step})

    def _open(self) -> None:
        """Find or start the run, and the last step that it had when this process first opened it."""
        wandb = import_module("wandb")
        self._was_started, self._defined_groups = wandb.run is None, set[str]()
        self._run = wandb.init(**self._settings) if wandb.run is None else wandb.run
        self._run.define_metric(_WANDB_STEP)
        if self._last_earlier_step is None:
            self._last_earlier_step = int(self._run.summary.get(_WANDB_STEP, -1))
        self._place = f"run {self._run.id} of Weights & Biases"
        # Opened again by this process, it goes on with the same run.
        self._settings.update(id=self._run.id, resume="allow")

    def close(self) -> None:
        """Finish the run, if `scalars` has started it; a later call resumes it."""
        if self._was_started:
            self._run.finish()
        self._run, self._was_started = None, False

    def __str__(self) -> str:
        return self._place or "Weights & Biases"


_WANDB_STEP = "amanda/step"


class OpenTelemetryWriter:
    """Set gauges of OpenTelemetry: one for each tool, whose attribute `name` is the rest of a number's name.

    The gauges are "amanda.stats", "amanda.flops" and so on, and "amanda.step".  Where they go, and how often,
    is up to the program's provider of meters; without one the numbers go nowhere.

    Args:
        meter: Meter that makes the gauges; None for that of the global provider.

    Raises:
        LiveError: Without opentelemetry.
    """

    def __init__(self, meter: Any = None) -> None:
        _check_installed("OpenTelemetryWriter", "opentelemetry")
        self._meter = meter
        self._gauges: dict[str, Any] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges to the numbers of a step."""
        for name, value in values.items():
            tool, _, rest = name.partition("/")
            self._gauge(tool).set(value, {"name": rest})
        self._gauge("step").set(step)

    def _gauge(self, name: str) -> Any:
        """Return the gauge of a tool or of the step."""
        if name not in self._gauges:
            # The global provider is asked at the first log: programs set it after their imports.
            meter = self._meter or import_module("opentelemetry.metrics").get_meter("amanda")
            self._gauges[name] = meter.create_gauge(f"amanda.{name}")
        return self._gauges[name]

    def __str__(self) -> str:
        return "OpenTelemetry"
