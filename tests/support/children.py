"""Child processes of tests: each has a time limit, and is killed with every process that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LIMIT = 600.0
PLACE = str(Path(__file__).parent)
# A shell that runs a job in the background, and nohup, have these ignored, which children inherit.
INHERITED = [
    getattr(signal, name) for name in ("SIGINT", "SIGQUIT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


def run(
    command: Sequence[Any] | str,
    *,
    input: str | None = None,
    check: bool = False,
    limit: float = LIMIT,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as subprocess.run does; its output is kept as text.

    Raises AssertionError if the command, or a process that keeps its output open, outlives `limit` seconds.
    """
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with started(command, stdin=stdin, **given) as child:
        try:
            out, err = child.communicate(input, timeout=limit)
        except subprocess.TimeoutExpired:
            kill(child)
            raise AssertionError(f"{command} ran longer than {limit} s\n{_rest(child)}") from None
    if check and child.returncode:
        raise AssertionError(f"{command} ended with {child.returncode}\n{out or ''}{err or ''}")
    return subprocess.CompletedProcess(command, child.returncode, out, err)


@contextlib.contextmanager
def started(command: Sequence[Any] | str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a process group of its own, which is killed at the end of the block."""
    with signals_by_default():
        child = subprocess.Popen(command, start_new_session=True, **{"text": True, **options})
    try:
        yield child
    finally:
        kill(child)
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        child.wait(timeout=60)


def kill(child: subprocess.Popen[str]) -> None:
    """Kill a process that was started here, and the processes of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()


@contextlib.contextmanager
def signals_by_default() -> Iterator[None]:
    """Give children the default actions of the signals that this process ignores."""
    ignored = [number for number in INHERITED if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        # Of a handler, unlike of SIG_DFL, this process does not die; exec makes SIG_DFL of it.
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def end_after(seconds: int) -> None:
    """End this process, a fork of the tests' own, at that age: SIGALRM kills it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


@contextlib.contextmanager
def killed(processes: Sequence[Any], limit: float = LIMIT) -> Iterator[None]:
    """Kill processes of multiprocessing at the end of the block, or `limit` seconds after its beginning."""

    def kill_all() -> None:
        for process in processes:
            process.kill()

    timer = threading.Timer(limit, kill_all)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        kill_all()
        for process in processes:
            process.join()


def _rest(child: subprocess.Popen[str]) -> str:
    """Return what a killed process has printed; a process outside of its group may hold the output open."""
    try:
        return "".join(filter(None, child.communicate(timeout=10)))
    except subprocess.TimeoutExpired:
        return "its output is held open by a process outside of its group"
