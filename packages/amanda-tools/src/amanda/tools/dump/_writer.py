"""A folder that is filled while a program runs, and can be read at any time."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError
from amanda.tools.dump._arrays import Format, write_arrays, write_whole
from amanda.tools.dump._entry import Entry, Kept, Op, op_to_dict
from amanda.tools.dump._reader import INDEX, NAME, VERSION, Dump

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amanda import Report

SHARD = 64 << 20
"""Bytes of tensors that wait to be written into one file."""
_SECONDS, _PATIENCE = 2.0, 20.0
_LOCK = Lock()
"""Of all writers, since one that has a lock of its own could not be copied before its first scope."""


class Writer:
    """Ops, entries and tensors, written now and then: the tensors first, then the index that has them.

    The index is written anew each time, and so seldom that this takes a small share of the time.  Nothing
    is made in the folder before the first writing; where another process has written by then, this one has
    a folder of its own in it.

    reports: those of the scopes whose ops are in the dump.
    """

    def __init__(self, folder: Path, form: Format, overwrite: bool) -> None:
        folder = folder.absolute()  # the program may go elsewhere before all is written
        self.folder, self._form = folder, form
        self._process = os.getpid()
        self.ops: list[Op] = []
        self.reports: list[Report] = []
        self._check(overwrite)
        self._replaced, self._own = _stamp(folder / INDEX), False
        self.clear()

    def _check(self, overwrite: bool) -> None:
        """Raises AmandaError where something is in the way."""
        if not self.folder.exists():
            return
        if not self.folder.is_dir():
            raise AmandaError(f"{self.folder} is no folder that a dump could be written into")
        there = sorted(path.name for path in self.folder.iterdir())
        if there and INDEX not in there:
            raise AmandaError(f"{self.folder} has {there[0]} in it; give a folder that is empty or not there")
        if there and not overwrite:
            raise AmandaError(f"{self.folder} has a dump in it; give overwrite=True or another folder")

    def clear(self) -> None:
        """Forget the entries; those that were written go with the next writing."""
        self._kept: list[Kept] = []
        self._texts: list[str] = []  # of the entries that have been written
        self._waiting: dict[str, NDArray[Any]] = {}
        self._bytes = self._shards = 0
        self._due = monotonic() + _SECONDS
        self._changed = self._begun = False

    def add_op(self, op: Op) -> int:
        """Take an op in; its index."""
        with _LOCK:
            self.ops.append(op)
            return len(self.ops) - 1

    @property
    def entries(self) -> list[Entry]:
        """Return all entries, in order."""
        return [one.entry() for one in self._kept]

    def add(self, kept: Kept, array: NDArray[Any] | None = None) -> None:
        """Take an entry in, with its tensor if that is kept."""
        with _LOCK:
            self._kept.append(kept if array is None else self._with_file(kept, array))
            self._changed = True
            full = self._bytes >= SHARD or monotonic() >= self._due
        if full:
            self.flush()

    def _with_file(self, kept: Kept, array: NDArray[Any]) -> Kept:
        op = self.ops[kept.op]
        name = f"{len(self._kept):06d}.{op.module}.{op.type}.{kept.role}.{kept.position}"
        key = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        self._waiting[key] = array
        self._bytes += array.nbytes
        return kept._replace(dtype=array.dtype.name, file=self._shard(), key=key)

    def _shard(self) -> str:
        return f"tensors-{self._shards:05d}.{self._form}"

    def flush(self) -> None:
        """Write what waits, if this is the process that the dump belongs to."""
        if self._changed and os.getpid() == self._process:
            with _LOCK:
                self._write()

    def _write(self) -> None:
        start = monotonic()
        self._make_room()
        if self._waiting:
            write_arrays(self.folder / self._shard(), self._waiting, self._form)
            self._waiting, self._bytes = {}, 0
            self._shards += 1
        self._texts += [json.dumps(one.entry().to_dict()) for one in self._kept[len(self._texts) :]]
        index = json.dumps({
            "schema": f"amanda.{NAME}", "version": VERSION,
            "ops": [op_to_dict(op) for op in self.ops],
            "op_by_op": self._op_by_op(),
        })  # fmt: skip
        text = f'{index[:-1]}, "entries": [{", ".join(self._texts)}]}}'
        write_whole(self.folder / INDEX, lambda file: file.write(text.encode()))
        self._changed = False
        took = monotonic() - start
        self._due = monotonic() + max(_SECONDS, _PATIENCE * took)

    def _op_by_op(self) -> list[list[str]]:
        """Names and lines of the compiled callables that ran as eager code, each once."""
        found = {(entry.what, entry.where) for report in self.reports for entry in report.op_by_op}
        return [list(one) for one in sorted(found)]

    def _make_room(self) -> None:
        """Ahead of the first writing: remove an older dump, and take the folder, or one in it."""
        index = self.folder / INDEX
        if self._begun:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if index.exists() and (self._own or _stamp(index) == self._replaced):
            files = Dump(self.folder).files
            index.unlink()
            for name in files:
                (self.folder / name).unlink(missing_ok=True)
        if not self._own and not _is_taken(index):  # another process has come first
            self.folder = Path(tempfile.mkdtemp(prefix=f"process{self._process}-", dir=self.folder))
        self._own = self._begun = True


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return size and times of a file, by which another file in its place is noticed."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _is_taken(index: Path) -> bool:
    """Make an index without entries; False if there is one."""
    try:
        with index.open("x") as file:
            json.dump({"schema": f"amanda.{NAME}", "version": VERSION, "ops": [], "entries": []}, file)
    except FileExistsError:
        return False
    return True
