"""A folder that is filled while a program runs, and can be read at any time."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError
from amanda.files import check_folder_to_write, is_part, naming, write_file
from amanda.tools.dump._arrays import Format, write_arrays
from amanda.tools.dump._entry import Entry, Kept, Op, op_to_dict
from amanda.tools.dump._reader import FAILED, INCOMPLETE, INDEX, NAME, VERSION, Dump, is_tensor_file
from amanda.tools.results import is_lock, locked, to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amanda import Report

logger = logging.getLogger("amanda")

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

    Where a file cannot be written, that is logged once, the program goes on, and the next writing tries
    again; tensors that come to more than one file by then are lost.

    reports: those of the scopes whose ops are in the dump.  written: bytes of tensors in files.  failure:
    why something is not written; "" if all is.
    """

    def __init__(self, folder: Path, form: Format, overwrite: bool) -> None:
        folder = folder.absolute()  # the program may go elsewhere before all is written
        self.folder, self._form = folder, form
        self._process = os.getpid()
        self.ops: list[Op] = []
        self.reports: list[Report] = []
        self.failure, self._has_told = "", False
        self._check(overwrite)
        self._replaced, self._own = _stamp(folder / INDEX), False
        self.clear()

    def _check(self, overwrite: bool) -> None:
        """Raises AmandaError where something is in the way, or the folder cannot be written to."""
        check_folder_to_write(self.folder)
        if not self.folder.exists():
            return
        with naming(self.folder, "read"):
            names = sorted(path.name for path in self.folder.iterdir())
        there = [name for name in names if not _is_left(name)]
        if there and INDEX not in there:
            raise AmandaError(f"{self.folder} has {there[0]} in it; give a folder that is empty or not there")
        if there and not overwrite:
            raise AmandaError(f"{self.folder} has a dump in it; give overwrite=True or another folder")
        if there:
            Dump(self.folder)  # raises for an index.json of something else, which is not overwritten

    def clear(self) -> None:
        """Forget the entries; those that were written go with the next writing."""
        self._kept: list[Kept] = []
        self._texts: list[str] = []  # of the entries that have been written
        self._waiting: dict[str, NDArray[Any]] = {}
        self._bytes = self._shards = self.written = 0
        self._due = monotonic() + _SECONDS
        self._changed = self._begun = False
        self.failure = ""

    def add_op(self, op: Op) -> int:
        """Take an op in; its index."""
        with _LOCK:
            self.ops.append(op)
            return len(self.ops) - 1

    @property
    def entries(self) -> list[Entry]:
        """Return all entries, in order; those whose tensors wait to be written are without."""
        with _LOCK:
            shard = self._shard() if self._waiting else ""
            return [(_without(one) if one.file == shard else one).entry() for one in self._kept]

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
                try:
                    self._write()
                except (OSError, AmandaError) as error:
                    self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Note that nothing could be written; drop what waits if it is more than one file has."""
        self.failure = str(error)
        if self._begun:
            with suppress(OSError):
                (self.folder / INCOMPLETE).touch()  # an empty file needs no space
        if not self._has_told:
            self._has_told = True
            logger.warning("dump: %s; the program goes on, and the next writing tries again", error)
        if self._bytes >= SHARD:
            shard = self._shard()
            self._kept = [_without(one) if one.file == shard else one for one in self._kept]
            self._waiting, self._bytes = {}, 0
        self._due = monotonic() + _SECONDS

    def _write(self) -> None:
        start = monotonic()
        self._make_room()
        if self._waiting:
            write_arrays(self.folder / self._shard(), self._waiting, self._form)
            self.written += self._bytes
            self._waiting, self._bytes = {}, 0
            self._shards += 1
        self._texts += [to_json(one.entry().to_dict()) for one in self._kept[len(self._texts) :]]
        index = to_json({
            "schema": f"amanda.{NAME}", "version": VERSION,
            "ops": [op_to_dict(op) for op in self.ops],
            "op_by_op": self._op_by_op(),
        })  # fmt: skip
        text = f'{index[:-1]}, "entries": [{", ".join(self._texts)}]}}'
        write_file(self.folder / INDEX, text)
        if self.failure:
            (self.folder / INCOMPLETE).unlink(missing_ok=True)
        self._changed, self.failure = False, ""
        took = monotonic() - start
        self._due = monotonic() + max(_SECONDS, _PATIENCE * took)

    def _op_by_op(self) -> list[list[str]]:
        """Names and lines of the compiled callables that ran as eager code, each once."""
        found = {(entry.what, entry.where) for report in self.reports for entry in report.op_by_op}
        return [list(one) for one in sorted(found)]

    def _make_room(self) -> None:
        """Ahead of the first writing: remove an older dump, and take the folder, or one in it."""
        if self._begun:
            return
        index = self.folder / INDEX
        with naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._own:
                self._remove()
            elif self._replaced is not None and _stamp(index) == self._replaced:
                with locked(index):
                    if _stamp(index) == self._replaced:
                        self._remove()
            if not self._own and not _is_taken(index):  # another process has come first
                self.folder = self.folder / f"process{self._process}-{token_hex(4)}"
                self.folder.mkdir()
        self._own = self._begun = True

    def _remove(self) -> None:
        """Remove an older dump: its index, and what else has a name that a dump gives to files."""
        names = [path.name for path in self.folder.iterdir()]
        for name in (
            INDEX,
            INCOMPLETE,
            *filter(is_tensor_file, names),
            *(name for name in names if _is_left(name, part=True)),
        ):
            (self.folder / name).unlink(missing_ok=True)


def _without(kept: Kept) -> Kept:
    """Return an entry whose tensor is not written."""
    return kept._replace(file=None, key=None, left_out=FAILED)


def _is_left(name: str, part: bool = False) -> bool:
    """Return True for hidden files that dumps leave: those that a killed process had begun, and locks.

    part: leave out locks, which others may hold.
    """
    whole = name[1:].rsplit(".", 2)[0]
    is_begun = is_part(name) and (whole == INDEX or is_tensor_file(whole))
    return is_begun or name == INCOMPLETE or (is_lock(name) and not part)


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
            file.write(to_json({"schema": f"amanda.{NAME}", "version": VERSION, "ops": [], "entries": []}))
    except FileExistsError:
        return False
    except BaseException:  # a full disk, which leaves it empty
        index.unlink(missing_ok=True)
        raise
    return True
