"""Trials that run here or in workers of joblib, the file that keeps their outcomes, and their progress."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from amanda.action import routine_name
from amanda.errors import AmandaError, ArtefactError
from amanda.files import naming
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger("amanda")


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """The end of a trial.  value: what it measured; None if `error` says why it failed."""

    trial: T
    value: R | None
    error: str = ""
    seconds: float = 0.0


def run_trials(
    load: Callable[[], Callable[[T], R]], trials: Sequence[T], jobs: int | None = None
) -> Iterator[Outcome[T, R]]:
    """Yield the outcomes of trials as they end; with several jobs in any order.

    A trial is a value, such as a seed; what it measures has to follow from it alone, so that the numbers are
    the same wherever it runs.  An exception of a trial is its error, and so is the end of its process.

    Args:
        load: Returns the function that measures a trial.  It is called once in each process, and is pickled
            with all that it refers to, such as a model, or makes the model itself.
        trials: Are pickled one by one.
        jobs: Number of processes, as joblib's `n_jobs`: -1 for one a core; None for 1, or for those of the
            engine of `joblib.parallel_config`, such as "loky", "dask" or "ray".

    Raises:
        AmandaError: For an engine of threads, which would share the model, and where `load` cannot be
            pickled.  Exceptions of `load`, and errors of Amanda in a trial, reach the caller.
    """
    if jobs == 0 or isinstance(jobs, bool) or not isinstance(jobs, (int, type(None))):
        raise AmandaError(f"jobs is {jobs!r}; give a number of processes, -1 for one a core, or None")
    # Without joblib in the process nobody has configured it.
    if jobs == 1 or (jobs is None and "joblib" not in sys.modules):
        return _run_here(load, trials)
    engine = _Engine.configured(jobs)
    return _run_here(load, trials) if engine is None else _run_in_workers(engine, load, list(trials))


def _run_here(load: Callable[[], Callable[[T], R]], trials: Sequence[T]) -> Iterator[Outcome[T, R]]:
    """Yield the outcomes of trials that run in this process, each when the caller asks for it."""
    measure = load() if trials else None
    for trial in trials:
        assert measure is not None
        yield _measure(measure, trial)


def _measure(measure: Callable[[T], R], trial: T) -> Outcome[T, R]:
    """Return the outcome of a trial; an exception that is not Amanda's is its error."""
    begin = perf_counter()
    try:
        return Outcome(trial, measure(trial), "", perf_counter() - begin)
    except AmandaError:
        raise
    except Exception as error:
        return Outcome(trial, None, f"{type(error).__name__}: {error}", perf_counter() - begin)


_Answer: TypeAlias = tuple[int, "Outcome[Any, Any] | Exception"]
"""The number of a trial, with its outcome or an exception that is to reach the caller of `run_trials`."""


class _Engine(NamedTuple):
    """Processes of joblib.

    jobs: as joblib's `n_jobs`.  workers: the number of processes.  backend: joblib's object.
    """

    jobs: int | None
    workers: int
    backend: Any

    @classmethod
    def configured(cls, jobs: int | None) -> _Engine | None:
        """Return the engine that joblib is configured to have; None for one process, this one."""
        import joblib
        from joblib.parallel import get_active_backend

        backend, _ = get_active_backend()
        engine = cls(jobs, joblib.effective_n_jobs(jobs), backend)
        # Dask's single worker may be another machine.
        if engine.workers == 1 and engine._dask_client() is None:
            return None
        if type(backend).__name__ == "ThreadingBackend":
            raise AmandaError(
                "joblib is configured for threads, which would change one model at the same time; "
                'give parallel_config(backend="loky"), "dask" or "ray"'
            )
        return engine

    @property
    def maps_arrays(self) -> bool:
        """Return True for joblib's own processes, which read a large array from one file."""
        return type(self.backend).__module__.startswith("joblib.") and self._dask_client() is None

    def batch_size(self, trials: int) -> int:
        """Return how many trials a worker gets at once."""
        # Other engines send what the workers run along with each batch.
        return 1 if self.maps_arrays else max(1, trials // (4 * self.workers))

    def run(
        self, worker: _Worker, trials: Mapping[int, T], batch_size: int
    ) -> Generator[_Answer, None, None]:
        """Yield what came of each trial, as batches end."""
        import joblib

        payload = np.frombuffer(worker.payload, np.uint8) if self.maps_arrays else worker.payload
        numbers = list(trials)
        batches = [numbers[i : i + batch_size] for i in range(0, len(numbers), batch_size)]
        tasks = [
            joblib.delayed(_Worker.run)(payload, worker.digest, worker.threads, {i: trials[i] for i in batch})
            for batch in batches
        ]
        client = self._dask_client()
        if client is not None:
            yield from _run_on_dask(client, tasks)
        elif self.maps_arrays:
            for answers in joblib.Parallel(self.jobs, return_as="generator_unordered", batch_size=1)(tasks):
                yield from answers
        else:
            # Ray's engine returns lists alone.  In rounds, an interrupt loses little.
            for i in range(0, len(tasks), 2 * self.workers):
                for answers in joblib.Parallel(self.jobs, batch_size=1)(tasks[i : i + 2 * self.workers]):
                    yield from answers

    def _dask_client(self) -> Any:
        """Return the client of Dask; None for another engine."""
        return getattr(self.backend, "client", None)


def _run_on_dask(client: Any, tasks: Sequence[Any]) -> Iterator[_Answer]:
    """Yield what came of each trial from a cluster of Dask."""
    # Not by joblib's engine: it waits for ever for a task whose worker died too often, and scatters large
    # arguments to one worker, with which they are lost.
    from distributed import as_completed

    futures = [client.submit(function, *arguments, pure=False) for function, arguments, _ in tasks]
    try:
        for future in as_completed(futures):  # type: ignore[no-untyped-call]
            yield from future.result()
    finally:
        client.cancel(futures)


def _run_in_workers(
    engine: _Engine, load: Callable[[], Callable[[T], R]], trials: Sequence[T]
) -> Iterator[Outcome[T, R]]:
    """Yield the outcomes of trials that run in workers; those of a worker that died run again."""
    worker = _Worker.of(load)
    remaining = dict(enumerate(trials))
    batch_size = engine.batch_size(len(trials))
    while remaining:
        try:
            yield from _collect(engine.run(worker, remaining, batch_size), remaining)
        except _EngineError:
            if batch_size > 1:
                batch_size = 1
                continue
            # One of the trials that were running has ended its process, and nothing tells which: each of
            # these runs again alone.
            for number in list(remaining)[: 2 * engine.workers]:
                alone = {number: remaining[number]}
                try:
                    yield from _collect(engine.run(worker, alone, 1), alone)
                except _EngineError as error:
                    yield Outcome(remaining[number], None, f"its process ended: {error}")
                del remaining[number]


class _EngineError(Exception):
    """joblib raised an exception that no trial has raised, such as for a process that died."""


def _collect(answers: Generator[_Answer, None, None], remaining: dict[int, T]) -> Iterator[Outcome[T, Any]]:
    """Yield the outcomes of an engine, and drop their trials.  Raises _EngineError, and errors of workers."""
    # Closing ends the trials that run when the caller has enough, or is interrupted.
    with closing(answers):
        while True:
            try:
                number, answer = next(answers)
            except StopIteration:
                return
            except Exception as error:
                raise _EngineError(f"{type(error).__name__}: {error}") from error
            if isinstance(answer, BaseException):
                raise answer
            del remaining[number]
            yield answer


_lock = threading.Lock()
_measures: dict[str, Callable[[Any], Any]] = {}
"""In a worker: the function that measures, by the digest of what it was loaded from; one at most."""


class _Worker(NamedTuple):
    """What a worker runs.  payload: the pickled `load`.  threads: PyTorch's, of this process, or None."""

    payload: bytes
    digest: str
    threads: int | None

    @classmethod
    def of(cls, load: Callable[[], Any]) -> _Worker:
        """Pickle a function.  Raises AmandaError where that is not possible."""
        import cloudpickle

        try:
            payload = cloudpickle.dumps(load)
        except Exception as error:
            raise AmandaError(
                f"what the workers run cannot be sent to them: {error}; give a function that makes the model "
                "and its data itself, or jobs=1"
            ) from error
        torch = sys.modules.get("torch")
        return cls(payload, sha256(payload).hexdigest(), None if torch is None else torch.get_num_threads())

    @staticmethod
    def run(
        payload: bytes | NDArray[Any], digest: str, threads: int | None, trials: Mapping[int, Any]
    ) -> list[_Answer]:
        """Measure trials in a worker; return with each an exception that is to reach the caller, if any."""
        answers: list[_Answer] = []
        # A worker with several threads, as Dask's are, has one model for all of them.
        with _lock:
            for number, trial in trials.items():
                try:
                    if digest not in _measures:
                        _measures.clear()
                        _measures[digest] = _load(bytes(payload), threads)
                    answers.append((number, _measure(_measures[digest], trial)))
                except Exception as error:
                    answers.append((number, _sendable(error)))
        return answers


def _load(payload: bytes, threads: int | None) -> Callable[[Any], Any]:
    """Return the function that measures, with as many threads as in the process that sent it."""
    import cloudpickle

    if threads is not None:
        # joblib gives each process its share of the cores; sums of other lengths would have other bits.
        import torch

        torch.set_num_threads(threads)
    measure: Callable[[Any], Any] = cloudpickle.loads(payload)()
    return measure


def _sendable(error: Exception) -> Exception:
    """Return an exception, or one with its text if it cannot be pickled and made again."""
    import cloudpickle

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return AmandaError(f"{type(error).__name__}: {error}")
    return error


class TrialFile:
    """Records of trials in a file of JSON lines, so that a run which was interrupted goes on.

    The first line says what the trials are of; each further line is one that ended.  A line is on the disk
    before the next trial begins, and an unfinished last line is dropped.

    Args:
        path: Made if there is none.
        kind: Of the trials, such as "sweep".
        options: That decide what the trials measure, as JSON has them.

    Raises:
        ArtefactError: For a file of other trials, or one that another process writes.  FileError for one that
            cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, options: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.records: dict[str, Any] = {}
        """The record of each trial, by its key."""
        header = json.loads(json.dumps({"format": f"amanda {kind}", "version": 1, "options": options}))
        with naming(self.path):
            self._file = self.path.open("a+", encoding="utf-8")
        try:
            self._hold()
            self._read(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TrialFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, key: str, record: Any) -> None:
        """Write the record of a trial, which replaces an earlier one of the key."""
        self.records[key] = record
        self._write([key, record])

    def _hold(self) -> None:
        """Lock the file until it is closed; raise ArtefactError if another process has it."""
        if sys.platform == "win32":
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArtefactError(f"{self.path} is being written by another process") from None
        except OSError:  # a file system without locks
            pass

    def _read(self, header: Mapping[str, Any]) -> None:
        """Read the records; write the header of a new file."""
        with naming(self.path, "read"):
            self._file.seek(0)
            try:
                *lines, unfinished = self._file.read().split("\n")
                entries = [json.loads(line) for line in lines]
            except ValueError as error:
                raise ArtefactError(f"{self.path} is no file of trials: {error}") from error
        if unfinished:
            with naming(self.path):
                size = sum(len(line.encode()) + 1 for line in lines)
                os.truncate(self.path, size)
        if not entries:
            self._write(header)
            return
        self._check(entries[0], header)
        try:
            self.records = dict(entries[1:])
        except (TypeError, ValueError) as error:
            raise ArtefactError(f"{self.path} is no file of trials: {error}") from error

    def _check(self, found: Any, header: Mapping[str, Any]) -> None:
        """Raise ArtefactError unless the header of the file is the one expected."""
        if found == header:
            return
        if not isinstance(found, dict) or found.get("format") != header["format"]:
            raise ArtefactError(f"{self.path} is no file of {header['format']} trials; give another file")
        options = found.get("options", {})
        names = [name for name, value in header["options"].items() if options.get(name) != value]
        differences = "; ".join(
            f"{name} was {options.get(name)!r} and is {header['options'][name]!r}" for name in names
        )
        raise ArtefactError(
            f"{self.path} has trials with other options: {differences or 'another version'}; "
            "give another file"
        )

    def _write(self, entry: Any) -> None:
        with naming(self.path):
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


class Progress:
    """Show a bar on a terminal, elsewhere a line for each point."""

    def __init__(self, is_visible: bool) -> None:
        from rich import progress
        from rich.console import Console

        self._console = Console(stderr=True, soft_wrap=True)
        self._lines = is_visible and not self._console.is_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(),
            progress.MofNCompleteColumn(), progress.TimeRemainingColumn(),
            console=self._console, transient=True, disable=self._lines or not is_visible,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._count = self._total = 0
        self._description = ""

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if not self._bar.disable:  # else it would end a line that nobody began
            self._bar.stop()

    def begin(self, total: int, description: str, count: int = 0) -> None:
        """Announce the measurement of a point.  count: points measured before it."""
        self._count, self._total, self._description = count, total, description
        self._bar.update(self._task, description=description, total=total, completed=count)

    def done(self, outcome: str) -> None:
        """Report the outcome of the point."""
        self._bar.update(self._task, completed=self._count + 1)
        if self._lines:
            line = f"{self._count + 1}/{self._total} {self._description}: {outcome}"
            self._console.print(line, highlight=False, markup=False)

    @staticmethod
    def attempt(measure: Callable[[], T], description: str) -> tuple[T | None, str]:
        """Return the value of a function of the user, and ""; or None and its exception, as text.

        The exception is logged with the description.  Errors of Amanda and interrupts reach the caller.
        """
        try:
            return measure(), ""
        except AmandaError:
            raise
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            logger.warning("%s: %s", description, error)
            return None, error


def check_number(value: Any, evaluate: Any, error: type[AmandaError], name: str = "") -> float:
    """Return a number, from the value that a function of the user, `evaluate`, returned.

    Raises an `error` for a value that is not a number, and ValueError for one that is not finite.

    Args:
        name: Of the number, where it has to be finite; "" for a number that may be NaN or infinite.
    """
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (RuntimeError, TypeError, ValueError) as reason:  # torch's own, for several numbers
        raise error(
            f"{routine_name(evaluate)} gave {value!r}; give a number, such as an accuracy"
        ) from reason
    if name and not isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number
