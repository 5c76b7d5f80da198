"""Writer of a dump: a folder that is filled while a program runs, and can be read at any time."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from secrets import token_hex
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError
from amanda.files import check_folder_to_write, is_part, naming, write_file
from amanda.tools.dump._reader import (
    FAILED,
    INCOMPLETE,
    INDEX,
    NAME,
    VERSION,
    Dump,
    Entry,
    Format,
    Op,
    RawEntry,
    is_tensor_file,
    op_to_dict,
    write_arrays,
)
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.results import is_lock, locked, to_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amanda import Report

    RawEntries = Callable[[], Iterable[RawEntry]]

SAMPLE_SIZE = 32
"""Numbers in a sample."""


def exact_array(tensor: Any) -> NDArray[Any] | None:
    """Return a copy of all numbers; None for a tensor that is not one array, or has no numbers."""
    tensors = tensors_of(tensor)
    dense = tensors.dense(tensor)
    return None if dense is None else tensors.exact(dense)


def sample_of(tensor: Any) -> NDArray[Any]:
    """Return at most `SAMPLE_SIZE` numbers of a tensor, at even distances; none of one that has no array."""
    if isinstance(tensor, np.ndarray):  # a hot path
        return tensor.take(_sample_positions(tensor.size))
    tensors = tensors_of(tensor)
    if (array := tensors.shared(tensor)) is not None:
        return sample_of(array)
    dense = tensors.dense(tensor)
    size = 0 if dense is None else prod(tensors.extents(dense))
    return tensors.exact(tensors.at(dense, _sample_positions(size).tolist())) if size else np.empty(0)


@lru_cache(maxsize=1024)
def _sample_positions(size: int) -> NDArray[np.int64]:
    count = min(size, SAMPLE_SIZE)
    return np.arange(count) * (size - 1) // max(count - 1, 1)


logger = logging.getLogger("amanda")

SHARD = 64 << 20
"""Bytes of tensors that wait to be written into one file."""
# Least seconds between two writings, and how many times as long as a writing took.
_INTERVAL, _INTERVAL_RATIO = 2.0, 20.0
# Of all writers, since one that has a lock of its own could not be copied before its first scope.
_LOCK = Lock()


class Writer:
    """Writer of a dump: keeps entries and tensors, and every few seconds writes these, then the index.

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
        self._pid = os.getpid()
        self.ops: list[Op] = []
        self.reports: list[Report] = []
        self.failure, self._has_warned = "", False
        # Of the dump that the first write replaces; None without one, and for another process's of this run.
        self._stamp_of_older_dump, self._has_own_dump = _file_stamp(folder / INDEX), False
        self._check_folder(overwrite)
        self.clear()

    def _check_folder(self, overwrite: bool) -> None:
        """Raise AmandaError for a folder that has other files or a dump to keep, or that is not writable."""
        check_folder_to_write(self.folder)
        if not self.folder.exists():
            return
        with naming(self.folder, "read"):
            # Only a dump, or what a killed one left, is replaced; anything else may be the user's work.
            names = sorted(path.name for path in self.folder.iterdir())
        other_names = [name for name in names if not _is_leftover(name)]
        if other_names and INDEX not in other_names:
            raise AmandaError(f"{self.folder} has {other_names[0]} in it; give an empty folder, or a new one")
        if other_names and _is_of_this_run(self.folder / INDEX):
            self._stamp_of_older_dump = None  # another process's, which is kept
        elif other_names and not overwrite:
            option = "dump:overwrite (shell), overwrite=True (Python)"
            raise AmandaError(f"{self.folder} has a dump in it; give {option} or another folder")
        elif other_names:
            Dump(self.folder)  # raises for an index.json of something else, which is not overwritten

    def clear(self) -> None:
        """Delete all entries, and keep the ops; the next write removes the entries in the folder."""
        self._raw_entries: list[RawEntry] = []
        self._unmade: list[RawEntries] = []  # behind those
        # JSON of the entries that have been written; tensors by key for the next file, with their bytes.
        self._texts: list[str] = []
        self._pending_tensors: dict[str, NDArray[Any]] = {}
        self._pending_bytes = self._shard_count = self.written = 0
        self._next_write = monotonic() + _INTERVAL
        self._has_unwritten_entries = self._has_claimed_folder = False
        self.failure = ""

    def add_op(self, op: Op) -> int:
        with _LOCK:
            self.ops.append(op)
            return len(self.ops) - 1

    @property
    def entries(self) -> list[Entry]:
        """Measure and return all entries, in order; those whose tensors are not written yet name no file."""
        with _LOCK:
            # An entry names its file before that is written, so the name alone proves nothing.
            shard = self._shard_name() if self._pending_tensors else ""
            return [_without_tensor_in(shard, entry).to_entry() for entry in self._made_entries()]

    def add(self, raw: RawEntry | RawEntries, array: NDArray[Any] | None = None) -> None:
        """Add an entry, maybe with its tensor, or a function that makes entries when needed; write if due."""
        with _LOCK:
            if callable(raw):
                self._unmade.append(raw)
            elif array is None:
                self._made_entries().append(raw)
            else:
                self._made_entries().append(raw._replace(entry=self._add_tensor(raw.entry, array)))
            self._has_unwritten_entries = True
            is_due = self._pending_bytes >= SHARD or monotonic() >= self._next_write
        if is_due:
            self.flush()

    def _made_entries(self) -> list[RawEntry]:
        """Return all entries; make those that are not made yet."""
        while self._unmade:
            self._raw_entries += self._unmade.pop(0)()
        return self._raw_entries

    def _add_tensor(self, entry: Entry, array: NDArray[Any]) -> Entry:
        """Keep a tensor for the next file; return its entry with the name of that file, and the key in it."""
        op = self.ops[entry.op]
        name = f"{len(self._made_entries()):06d}.{op.module}.{op.type}.{entry.role}.{entry.position}"
        # Keys become names of members of an archive, where a slash would be a folder.
        key = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        self._pending_tensors[key] = array
        self._pending_bytes += array.nbytes
        return entry._replace(dtype=array.dtype.name, file=self._shard_name(), key=key)

    def _shard_name(self) -> str:
        return f"tensors-{self._shard_count:05d}.{self._form}"

    def flush(self) -> None:
        """Write what is pending, unless this is a forked process; a failure is noted, not raised."""
        # A forked child has a copy of what is pending, which its parent writes.
        if self._has_unwritten_entries and os.getpid() == self._pid:
            with _LOCK:
                try:
                    self._write_waiting()
                except (OSError, AmandaError) as error:
                    self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        """Note why writing failed, warn once, mark the folder; drop pending tensors that fill a file."""
        self.failure = str(error)
        if self._has_claimed_folder:
            with suppress(OSError):
                (self.folder / INCOMPLETE).touch()  # an empty file needs no space
        if not self._has_warned:
            self._has_warned = True
            logger.warning("dump: %s; the program continues, and the next write retries", error)
        # Keeping more would fill the memory while the disk stays full.
        if self._pending_bytes >= SHARD:
            shard = self._shard_name()
            self._raw_entries = [_without_tensor_in(shard, entry) for entry in self._made_entries()]
            self._pending_tensors, self._pending_bytes = {}, 0
        self._next_write = monotonic() + _INTERVAL

    def _write_waiting(self) -> None:
        """Claim the folder, write the tensors that wait, then the index; set the time of the next writing."""
        start = monotonic()
        self._claim_folder()
        # Tensors first: the index must never name a file that is not there.
        if self._pending_tensors:
            write_arrays(self.folder / self._shard_name(), self._pending_tensors, self._form)
            self.written += self._pending_bytes
            self._pending_tensors, self._pending_bytes = {}, 0
            self._shard_count += 1
        # Only new entries become text, or each write would take longer than the one before.
        self._texts += [to_json(raw.to_entry().to_dict()) for raw in self._made_entries()[len(self._texts) :]]
        callables = {(entry.what, entry.where) for report in self.reports for entry in report.op_by_op}
        fields = {"ops": [op_to_dict(op) for op in self.ops], "op_by_op": [*map(list, sorted(callables))]}
        index = to_json({**_index_head(), **fields})
        text = f'{index[:-1]}, "entries": [{", ".join(self._texts)}]}}'
        write_file(self.folder / INDEX, text)
        if self.failure:
            (self.folder / INCOMPLETE).unlink(missing_ok=True)
        self._has_unwritten_entries, self.failure = False, ""
        duration = monotonic() - start
        # Writing takes at most a twentieth of the time, however long the index has become.
        self._next_write = monotonic() + max(_INTERVAL, _INTERVAL_RATIO * duration)

    def _claim_folder(self) -> None:
        """At the first write, remove an older dump, and claim the folder, or a new subfolder of another's."""
        if self._has_claimed_folder:
            return
        index = self.folder / INDEX
        with naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._has_own_dump:
                self._remove_older_dump()
            # Of processes that may overwrite the dump, the one that finds it unchanged under the lock does.
            elif self._stamp_of_older_dump is not None and _file_stamp(index) == self._stamp_of_older_dump:
                with locked(index):
                    if _file_stamp(index) == self._stamp_of_older_dump:
                        self._remove_older_dump()
            if not self._has_own_dump and not _claim_index(index):  # another process has come first
                self.folder = self.folder / f"process{self._pid}-{token_hex(4)}"
                self.folder.mkdir()
        self._has_own_dump = self._has_claimed_folder = True

    def _remove_older_dump(self) -> None:
        """Remove an older dump: its index, and what else has a name that a dump gives to files."""
        names = [path.name for path in self.folder.iterdir()]
        # The index first, which must not name files that are gone.
        for name in (INDEX, *names):
            if name == INDEX or is_tensor_file(name) or _is_leftover(name, part=True):
                (self.folder / name).unlink(missing_ok=True)


def _without_tensor_in(shard: str, raw: RawEntry) -> RawEntry:
    """Return an entry whose tensor is not written if it is in a file; any other entry as it is."""
    if raw.entry.file != shard:
        return raw
    return raw._replace(entry=raw.entry._replace(file=None, key=None, left_out=FAILED))


def _is_leftover(name: str, part: bool = False) -> bool:
    """Return True for files that dumps leave: begun ones and, unless `part`, locks, which others may hold."""
    final_name = name[1:].rsplit(".", 2)[0]
    is_begun = is_part(name) and (final_name == INDEX or is_tensor_file(final_name))
    return is_begun or name == INCOMPLETE or (is_lock(name) and not part)


def _file_stamp(path: Path) -> tuple[int, int] | None:
    """Return inode and time of a file, by which another file in its place is noticed; None without one."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    # A file that was replaced within one tick of the clock has another inode.
    return status.st_ino, status.st_mtime_ns


def _index_head() -> dict[str, Any]:
    """Return the first fields of an index, with what tells the processes of one `amanda run` from others."""
    settings = os.environ.get("AMANDA_TOOLS")  # which all processes of a run inherit
    run = settings and sha256(settings.encode()).hexdigest()[:16]
    return {"schema": f"amanda.{NAME}", "version": VERSION, "run": run}


def _is_of_this_run(index: Path) -> bool:
    """Return True for an index that a process of this process's `amanda run` has written."""
    expected_start = to_json(head := _index_head())[:-1].encode()
    with naming(index, "read"), index.open("rb") as file:  # its start tells, and the rest may be large
        return head["run"] is not None and file.read(len(expected_start)) == expected_start


def _claim_index(index: Path) -> bool:
    """Create an index without entries; return False if there is one."""
    try:
        # "x" fails if the file is there, so of several processes one alone claims the folder.
        with index.open("x") as file:
            file.write(to_json({**_index_head(), "ops": [], "entries": []}))
    except FileExistsError:
        return False
    except BaseException:  # a full disk, which leaves it empty
        index.unlink(missing_ok=True)
        raise
    return True
