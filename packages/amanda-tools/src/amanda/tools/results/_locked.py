"""A lock by which processes take turns at a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from amanda.errors import FileError
from amanda.files import naming

_PATIENCE = 60.0
_SUFFIX = ".lock"


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Keep other processes, and threads, from what they do under the same path; wait until they are done.

    The lock is a hidden file beside the path, which is gone afterwards.
    Raises FileError where it cannot be made, and where another process has it for a minute.
    """
    from filelock import FileLock, Timeout

    path = Path(path)
    lock = FileLock(path.with_name(f".{path.name[:60]}{_SUFFIX}"), timeout=_PATIENCE)
    with naming(path):
        try:
            lock.acquire()
        except Timeout:
            raise FileError(
                f"{path} cannot be written: another process has held {lock.lock_file} for {_PATIENCE:.0f} s"
            ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows, where the file of a lock cannot be removed
            Path(lock.lock_file).unlink()  # whoever waits for it makes it anew
        lock.release()


def is_lock(name: str) -> bool:
    """Return True for the name of a file that `locked` leaves."""
    return name.startswith(".") and name.endswith(_SUFFIX)
