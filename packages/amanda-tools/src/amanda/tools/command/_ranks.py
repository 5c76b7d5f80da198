"""Ranks that each began with `amanda run`, as of `torchrun -m amanda run`: the last to end tells for all."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from amanda.backend import digest
from amanda.tools.command._environment import number_of_ranks

if sys.platform != "win32":
    import fcntl

_OF_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


def folder_of_ranks() -> str | None:
    """A folder that the ranks of a launcher share; None where this is no rank, or they have several hosts."""
    if sys.platform == "win32" or number_of_ranks() < 2 or "RANK" not in os.environ:
        return None
    run = digest(os.getppid(), *(os.environ.get(name, "") for name in _OF_RUN))
    folder = Path(tempfile.gettempdir()) / f"amanda-{os.getuid()}-{run:016x}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return str(folder) if ours else None


class Rank:
    """One of the ranks, alive until it has left its results: others see a lock, which dies with it."""

    def __init__(self, folder: str, label: str) -> None:
        self._folder = Path(folder)
        (self._folder / f"{label}.json").unlink(missing_ok=True)
        self._alive: IO[str] | None = (self._folder / f"{label}.alive").open("w")
        fcntl.lockf(self._alive, fcntl.LOCK_EX)

    def end(self, leave: Callable[[], object], tell: Callable[[], None]) -> None:
        """Leave the results of this rank; tell those of all if no other is alive."""
        with _alone(self._folder / "telling"):
            leave()
            if self._alive is not None:
                self._alive.close()
                self._alive = None
            if not any(map(_is_alive, self._folder.glob("*.alive"))):
                tell()


def _is_alive(path: Path) -> bool:
    with path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield
