"""Trials that run in this process or in workers of joblib, Dask and Ray."""

from __future__ import annotations

import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import amanda
from amanda.action import routine_name
from amanda.backend import report_unseen
from amanda.errors import AmandaError
from amanda.options import shown
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


class PerProcess(Generic[R]):
    """A function that each process makes for itself, where it cannot be pickled with its model and data.

    >>> evaluate = PerProcess(lambda: abs)
    >>> evaluate(-1)
    1

    Args:
        make: Returns the function, at the first call in a process; the ops of `make` are not instrumented.

    Raises:
        AmandaError: At the first call, if `make` returns something else, such as a metric.
    """

    def __init__(self, make: Callable[[], Callable[..., R]]) -> None:
        self._make = make
        self._function: Callable[..., R] | None = None

    def __reduce__(self) -> Any:
        return PerProcess, (self._make,)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the function, which the first call in a process makes."""
        if self._function is None:
            # Parameters that were made in the scope of a tool would look like tensors of the program.
            with amanda.disabled():
                function = self._make()
            if not callable(function):
                raise AmandaError(
                    f"PerProcess: {routine_name(self._make)} returned {shown(function)}; give a function "
                    "that makes the model and its data, and returns the function that uses them"
                )
            self._function = function
        return self._function(*args, **kwargs)


def run_trials(
    load: Callable[[], Callable[[T], R]], trials: Sequence[T], jobs: int | None = None
) -> Generator[Outcome[T, R], None, None]:
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


def _run_here(
    load: Callable[[], Callable[[T], R]], trials: Sequence[T]
) -> Generator[Outcome[T, R], None, None]:
    """Yield the outcomes of trials that run in this process, each when the caller asks for it."""
    if trials:
        measure = load()
        for trial in trials:
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


_NumberedOutcome: TypeAlias = tuple[int, "Outcome[Any, Any] | Exception"]
"""The number of a trial, and its outcome, or an exception that the caller of `run_trials` has to get."""


class _Engine(NamedTuple):
    """The processes that joblib is configured for: its own, those of Dask or Ray, or of another engine.

    jobs: as joblib's `n_jobs`.  workers: the number of processes.  backend: joblib's object.
    """

    jobs: int | None
    workers: int
    backend: Any

    @classmethod
    def configured(cls, jobs: int | None) -> _Engine | None:
        """Return the engine that joblib is configured for; None where trials run in this process.

        Raises AmandaError for threads, which share the model.
        """
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

    def run(
        self, worker: _PickledFunction, trials: Mapping[int, T]
    ) -> Generator[_NumberedOutcome, None, None]:
        """Yield the numbered outcome of each trial, as trials end."""
        client = self._dask_client()
        if client is not None:
            yield from _run_on_dask(client, worker, trials)
        elif type(self.backend).__name__ == "RayBackend":
            yield from _run_on_ray(self.workers, worker, trials)
        else:
            yield from self._run_on_joblib(worker, trials)

    def _run_on_joblib(
        self, worker: _PickledFunction, trials: Mapping[int, T]
    ) -> Generator[_NumberedOutcome, None, None]:
        """Yield numbered outcomes from joblib's own processes, or from an engine that the user registered."""
        import joblib

        # joblib's own processes read a large array from one file, instead of a copy with each task.
        payload = np.frombuffer(worker.payload, np.uint8) if self.maps_arrays else worker.payload
        tasks = [
            joblib.delayed(_PickledFunction.run)(payload, worker.digest, worker.threads, number, trial)
            for number, trial in trials.items()
        ]
        if self.maps_arrays:
            answers = joblib.Parallel(self.jobs, return_as="generator_unordered", batch_size=1)(tasks)
            try:
                # Not `yield from`, which would close the generator outside of the filter below.
                for answer in answers:  # noqa: UP028
                    yield answer
            finally:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # that trials were stopped
                    answers.close()
            return
        # An engine of others may return lists alone.  In rounds, an interrupt loses little.
        round_size = 4 * self.workers
        for start in range(0, len(tasks), round_size):
            yield from joblib.Parallel(self.jobs, batch_size=1)(tasks[start : start + round_size])

    def _dask_client(self) -> Any:
        """Return the client of Dask; None for another engine."""
        return getattr(self.backend, "client", None)


def _run_on_dask(
    client: Any, worker: _PickledFunction, trials: Mapping[int, Any]
) -> Generator[_NumberedOutcome, None, None]:
    """Yield numbered outcomes from a cluster of Dask; then raise an exception of the cluster."""
    # Not by joblib's engine: it waits for ever for a task whose worker died too often, and scatters large
    # arguments to one worker, with which they are lost.
    from distributed import WorkerPlugin, as_completed

    class Payload(WorkerPlugin):  # type: ignore[misc]
        """Gives each worker of Dask, also one that starts later, the pickled function, in `_payloads`."""

        def __init__(self, pickled: _PickledFunction) -> None:
            self.payload, self.digest = pickled.payload, pickled.digest

        def setup(self, worker: Any) -> None:
            """Store the function in a worker that starts."""
            # Imported there: this class travels with copies of its globals.
            from amanda.tools.trials import _run

            _run._payloads[self.digest] = self.payload

        def teardown(self, worker: Any) -> None:
            from amanda.tools.trials import _run

            _run._payloads.pop(self.digest, None)

    failure: Exception | None = None
    client.register_plugin(Payload(worker), name=worker.digest)
    futures = [
        client.submit(_PickledFunction.run, None, worker.digest, worker.threads, number, trial, pure=False)
        for number, trial in trials.items()
    ]
    try:
        for future in as_completed(futures):
            try:
                answer = future.result()
            except Exception as error:
                failure = error
            else:
                yield answer
    finally:
        client.cancel(futures)
        client.unregister_worker_plugin(worker.digest)
    if failure is not None:
        raise failure


def _run_on_ray(
    workers: int, worker: _PickledFunction, trials: Mapping[int, Any]
) -> Generator[_NumberedOutcome, None, None]:
    """Yield numbered outcomes from a cluster of Ray; then raise an exception of the cluster."""
    # Not by Ray's engine for joblib: it waits for ever for a worker that died, and starts processes anew for
    # each list of tasks.
    import ray

    # Not twice for a process that ends by itself: the caller runs that trial again alone.
    remote_run = ray.remote(max_retries=0)(_PickledFunction.run)
    payload = ray.put(worker.payload)
    waiting, running = list(trials.items())[::-1], list[Any]()
    failure: Exception | None = None
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(remote_run.remote(payload, worker.digest, worker.threads, *waiting.pop()))
            (finished_task,), running = ray.wait(running, num_returns=1)
            try:
                answer = ray.get(finished_task)
            except Exception as error:
                failure = error
                continue
            yield answer
    finally:
        for task in running:
            ray.cancel(task, force=True)
    if failure is not None:
        raise failure


def _run_in_workers(
    engine: _Engine, load: Callable[[], Callable[[T], R]], trials: Sequence[T]
) -> Generator[Outcome[T, R], None, None]:
    """Yield the outcomes of trials that run in workers; those of a worker that died run again, alone.

    A second death is the error of a trial.  Reports that no tool of the scope is applied in workers.
    """
    worker = _PickledFunction.of(load)
    # Tools of an open scope stay in this process, as their results do.
    report_unseen("trials in other processes", "no tool of a scope around them is applied there")
    remaining = dict(enumerate(trials))
    while remaining:
        try:
            yield from _collect_outcomes(engine.run(worker, remaining), remaining)
        except _ProcessEnded:
            # One of the trials that were running has ended its process, and nothing tells which: each of
            # these, at most two a worker, runs again alone.
            for number in list(remaining)[: 2 * engine.workers]:
                single_trial = {number: remaining[number]}
                try:
                    yield from _collect_outcomes(engine.run(worker, single_trial), single_trial)
                except _ProcessEnded as error:
                    yield Outcome(remaining[number], None, str(error))
                del remaining[number]


class _ProcessEnded(Exception):
    """A process that ran trials has ended."""


_DEATHS = {"TerminatedWorkerError", "BrokenProcessPool", "KilledWorker", "WorkerCrashedError"}
"""Exceptions of loky, Dask and Ray for a process that has ended."""
_EXIT_CODES = re.compile(r"exit codes? of the workers? (?:are|is) \{(.*?)\}")
"""Of loky's message, such as `{SIGKILL(-9)}`."""


def _classify_engine_error(error: Exception) -> Exception:
    """Return the error for an exception of joblib, Dask or Ray, which no trial has raised.

    _ProcessEnded where a process that ran trials has died, AmandaError otherwise.
    """
    if type(error).__name__ not in _DEATHS:
        return AmandaError(f"the processes of joblib failed: {type(error).__name__}: {error}")
    codes = _EXIT_CODES.search(str(error))
    return _ProcessEnded("its process ended" + (f": {codes[1]}" if codes else ""))


def _collect_outcomes(
    numbered_outcomes: Generator[_NumberedOutcome, None, None], remaining: dict[int, T]
) -> Iterator[Outcome[T, Any]]:
    """Yield the outcomes of an engine, and remove their trials from the remaining ones.

    Raises _ProcessEnded, AmandaError for other exceptions of the engine, and errors of workers.
    """
    # Closing ends the trials that run when the caller has enough, or is interrupted.
    with closing(numbered_outcomes):
        while True:
            try:
                number, outcome = next(numbered_outcomes)
            except StopIteration:
                return
            except Exception as error:
                raise _classify_engine_error(error) from error
            if isinstance(outcome, BaseException):
                raise outcome
            del remaining[number]
            yield outcome


_lock = threading.Lock()
_measures: dict[str, Callable[[Any], Any]] = {}
"""In a worker: the function that measures, by the digest of what it was loaded from; one at most."""
_payloads: dict[str, bytes] = {}
"""In a worker of Dask: pickled functions, by their digests."""


class _PickledFunction(NamedTuple):
    """`load` of `run_trials`, pickled for workers: bytes, and their digest.

    threads: PyTorch's number of threads in this process; None without PyTorch.
    """

    payload: bytes
    digest: str
    threads: int | None

    @classmethod
    def of(cls, load: Callable[[], Any]) -> _PickledFunction:
        """Pickle a function, with this process's number of PyTorch's threads.

        Raises AmandaError where that is not possible.
        """
        import cloudpickle

        try:
            payload = cloudpickle.dumps(load)
        except Exception as error:
            raise AmandaError(
                f"what the workers run cannot be sent to them: {error}; give PerProcess of a function that "
                "makes the model and its data, or jobs=1"
            ) from error
        torch = sys.modules.get("torch")
        return cls(payload, sha256(payload).hexdigest(), None if torch is None else torch.get_num_threads())

    @staticmethod
    def run(
        payload: bytes | NDArray[Any] | None, digest: str, threads: int | None, number: int, trial: Any
    ) -> _NumberedOutcome:
        """Measure a trial in a worker; return its number and outcome, or an exception for the caller.

        An exception of the trial is in its outcome; those of `load` and of Amanda are for the caller.
        payload: None where Dask has brought it, see `_payloads`.
        """
        # A worker with several threads, as Dask's are, has one model for all of them.
        with _lock:
            try:
                if digest not in _measures:
                    _measures.clear()  # the model of an earlier run is released
                    _measures[digest] = _load_measure(
                        _payloads[digest] if payload is None else bytes(payload), threads
                    )
                return number, _measure(_measures[digest], trial)
            except Exception as error:
                return number, _make_sendable(error)


def _load_measure(payload: bytes, threads: int | None) -> Callable[[Any], Any]:
    """Return the function that measures, with as many threads as in the process that sent it."""
    import cloudpickle

    if threads is not None:
        # joblib gives each process its share of the cores; sums of other lengths would have other bits.
        import torch

        torch.set_num_threads(threads)
    measure: Callable[[Any], Any] = cloudpickle.loads(payload)()
    return measure


def _make_sendable(error: Exception) -> Exception:
    """Return an exception, or an AmandaError with its text if it cannot be pickled and made again."""
    import cloudpickle

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return AmandaError(f"{type(error).__name__}: {error}")
    return error
