"""A dump that was written, also one whose program died meanwhile."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError
from amanda.files import naming
from amanda.options import checked
from amanda.tools.dump._arrays import Arrays, read_arrays, shaped
from amanda.tools.dump._entry import Entry, Op, op_from_dict
from amanda.tools.results import check_schema, in_words, read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

INDEX, NAME, VERSION = "index.json", "dump", 1
INCOMPLETE, FAILED = ".incomplete", "a failed write"
"""An empty file in a folder that lacks what could not be written, and the reason why a tensor is left out."""
_TENSORS = re.compile(r"tensors-\d{5,}\.(safetensors|npz)", re.ASCII)
_OPENED = 4


class Dump:
    """The ops and entries of a folder's index; `array` reads a tensor that was kept.

    op_by_op: names and lines of compiled callables that ran as eager code.  incomplete: whether something
    could not be written, as on a full disk.
    Raises AmandaError for a folder without an index, or with one of a newer version.

    >>> dump = Dump("dump")  # doctest: +SKIP
    >>> [dump.array(entry) for entry in dump if dump.ops[entry.op].type == "conv2d"]  # doctest: +SKIP
    """

    @checked
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / INDEX
        with naming(path, "read"):
            if not path.exists():
                raise AmandaError(f"{self.folder} has no {INDEX}, so it is no dump")
        self.ops: list[Op]
        self.entries: list[Entry]
        self.op_by_op: list[tuple[str, str]]
        self.ops, self.entries, self.op_by_op = read_json(path, "index of a dump", _parts)
        self._check(path)
        failed = any(entry.left_out == FAILED for entry in self.entries)
        self.incomplete = failed or (self.folder / INCOMPLETE).exists()
        self._opened: OrderedDict[str, Arrays] = OrderedDict()

    def _check(self, path: Path) -> None:
        for entry in self.entries:
            if not 0 <= entry.op < len(self.ops):
                raise AmandaError(f"{path} has an entry of op {entry.op}, and {len(self.ops)} ops")
            if entry.file is not None and not is_tensor_file(entry.file):
                raise AmandaError(f"{path} names {entry.file!r}, which is no file of tensors in its folder")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def files(self) -> list[str]:
        """Names of the files that tensors are in."""
        return sorted({entry.file for entry in self.entries if entry.file is not None})

    def array(self, entry: Entry) -> NDArray[Any] | None:
        """The numbers of a tensor, in its element type (those that numpy lacks are of ml_dtypes).

        None where they were not kept.  Raises AmandaError for a file that cannot be read or lacks them.
        """
        if entry.file is None or entry.key is None:
            return None
        arrays = self._arrays(entry.file)
        if entry.key not in arrays:
            raise AmandaError(
                f"{self.folder / entry.file} has no tensor {entry.key!r}, which {INDEX} says that it has"
            )
        try:
            return shaped(arrays[entry.key], entry.dtype, entry.shape)
        except Exception as error:  # of a type that is none, or a number of bytes beyond all memory
            raise AmandaError(
                f"{self.folder / entry.file} and {INDEX} disagree at {entry.key!r}: {in_words(error)}"
            ) from error

    def _arrays(self, name: str) -> Arrays:
        if name not in self._opened:
            self._opened[name] = read_arrays(self.folder / name)
        self._opened.move_to_end(name)
        while len(self._opened) > _OPENED:
            self._opened.popitem(last=False)
        return self._opened[name]


def is_tensor_file(name: str) -> bool:
    """Return True for the name of a file with tensors: a dump has no others, but for its index."""
    return _TENSORS.fullmatch(name) is not None


def _parts(found: Mapping[str, Any]) -> tuple[list[Op], list[Entry], list[tuple[str, str]]]:
    check_schema(found, NAME, VERSION)
    ops, entries = map(op_from_dict, found["ops"]), map(Entry.from_dict, found["entries"])
    return list(ops), list(entries), [(str(what), str(where)) for what, where in found.get("op_by_op", ())]
