"""A dump that was written, also one whose program died meanwhile."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from amanda.errors import AmandaError
from amanda.tools.dump._arrays import Arrays, read_arrays, shaped
from amanda.tools.dump._entry import Entry, Op, op_from_dict

INDEX, SCHEMA, VERSION = "index.json", "amanda.dump", 1
_OPENED = 4


class Dump:
    """The ops and entries of a folder's index; `array` reads a tensor that was kept.

    Raises AmandaError for a folder that has no index of this schema and version.

    >>> dump = Dump("dump")  # doctest: +SKIP
    >>> [dump.array(entry) for entry in dump if dump.ops[entry.op].type == "conv2d"]  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / INDEX
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            schema = (found["schema"], found["version"])
            if schema != (SCHEMA, VERSION):
                raise ValueError(f"schema and version are {schema}, not {SCHEMA} and {VERSION}")
            self.ops: list[Op] = [op_from_dict(one) for one in found["ops"]]
            self.entries: list[Entry] = [Entry.from_dict(one) for one in found["entries"]]
        except FileNotFoundError:
            raise AmandaError(f"{self.folder} has no {INDEX}, so it is no dump") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise AmandaError(f"{path} is no index of a dump that can be read: {error!r}") from error
        self._check(path)
        self._opened: OrderedDict[str, Arrays] = OrderedDict()

    def _check(self, path: Path) -> None:
        for entry in self.entries:
            if not 0 <= entry.op < len(self.ops):
                raise AmandaError(f"{path} has an entry of op {entry.op}, and {len(self.ops)} ops")
            if entry.file is not None and Path(entry.file).name != entry.file:
                raise AmandaError(f"{path} names {entry.file!r}, which is not a file of its folder")

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
            raise AmandaError(f"{self.folder / entry.file} has no tensor {entry.key!r}")
        return shaped(arrays[entry.key], entry.dtype, entry.shape)

    def _arrays(self, name: str) -> Arrays:
        if name not in self._opened:
            self._opened[name] = read_arrays(self.folder / name)
        self._opened.move_to_end(name)
        while len(self._opened) > _OPENED:
            self._opened.popitem(last=False)
        return self._opened[name]
