"""Files of a dump: entries of the index, arrays, and the class that reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from amanda.errors import AmandaError
from amanda.files import naming, replacing, write_file
from amanda.options import checked
from amanda.tools.kit import Tensors
from amanda.tools.libraries import numpy as np
from amanda.tools.libraries import safetensors
from amanda.tools.results import (
    check_file,
    check_schema,
    field_values,
    in_words,
    made_of,
    parsing,
    read_json,
    read_npz,
)
from amanda.tools.stats import Statistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

Format = Literal["safetensors", "npz"]
Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"

# Element types that safetensors has; others are kept as bytes, and the index has their names.
_SAFETENSORS_TYPES = frozenset(
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu".split()
)


def write_arrays(path: Path, arrays: Arrays, form: Format) -> None:
    """Write arrays into one file atomically, those of other element types as bytes.  Raises FileError."""
    # Of NumPy's own types isbuiltin is 1; those of ml_dtypes np.savez does not have.
    is_safe = form == "safetensors"
    storable_arrays = {
        key: array if (array.dtype.name in _SAFETENSORS_TYPES if is_safe else array.dtype.isbuiltin == 1)
        else np.frombuffer(array.tobytes(), np.uint8)
        for key, array in arrays.items()
    }  # fmt: skip
    if is_safe:
        write_file(path, safetensors.numpy.save(storable_arrays))
        return
    with replacing(path) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, **storable_arrays)


def read_arrays(path: Path) -> Arrays:
    """Return a file's arrays, as bytes those of safetensors and types that npz lacks.  Raises AmandaError."""
    with parsing(path, "file of tensors"):
        if path.suffix == ".npz":
            return read_npz(path)
        check_file(path)
        # As bytes: the index has each element type, also those that NumPy lacks.
        raw_tensors = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        return {key: np.frombuffer(tensor["data"], np.uint8) for key, tensor in raw_tensors}


def restore_array(array: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array of a file with its element type and shape; raise AmandaError for another size."""
    kind = Tensors.numpy_type(dtype)
    # The index may be crafted: a negative extent, or one that asks for other memory, is refused.
    if kind.hasobject or min(shape, default=0) < 0 or prod(shape) * kind.itemsize != array.nbytes:
        raise AmandaError(f"{array.nbytes} bytes are no tensor of {dtype} and shape {list(shape)}")
    if array.dtype != kind:
        array = np.frombuffer(array.tobytes(), kind)
    return array.reshape(shape)


@dataclass(frozen=True)
class Op:
    """One op, forward or backward.

    id: of its place in the program.  of: id of the forward op of a backward op.  layout, weight_layout:
    axes by StandardMapping; None where they have no fixed meaning.  in_place: True if it writes into its
    first input.  parameters: positions of inputs that are parameters of a model, and their paths.
    """

    phase: str
    type: str
    module: str
    source: str
    namespace: str
    id: int
    of: int | None = None
    layout: str | None = None
    weight_layout: str | None = None
    in_place: bool = False
    parameters: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Summary:
    """Statistics and a sample of a tensor.

    sample: numbers at even distances in row-major order; magnitudes for complex numbers.
    """

    statistics: Statistics
    sample: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; `to_json` writes NaN and Inf as strings."""
        return {"statistics": self.statistics.to_dict(), "sample": list(self.sample)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Summary:
        """Return the summary that `to_dict` described."""
        return cls(Statistics.from_dict(value["statistics"]), tuple(map(float, value["sample"])))


class Entry(NamedTuple):
    """One tensor at one execution of an op.

    op: index among the ops.  order: number of executions of ops before this one.  execution: of this op,
    from 0.  role: "input", "weight", "output", "gradient" (output of a backward op) or "weight gradient".
    position: among the inputs, outputs or gradients.  file, key: where its numbers are; None if they are not
    stored, and then `left_out` names the option that excludes them.
    batches: number of axes in front that are the batches of a vmap.
    """

    op: int
    order: int
    execution: int
    role: str
    position: int
    shape: tuple[int, ...]
    dtype: str
    summary: Summary
    file: str | None = None
    key: str | None = None
    left_out: str | None = None
    batches: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**self._asdict(), "shape": list(self.shape), "summary": self.summary.to_dict()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Entry:
        """Return the entry that `to_dict` described; raise an error for another content."""
        # Files of earlier versions have no batches; every other field is needed.
        fields = {name: value[name] for name in cls._fields if name in value or name != "batches"}
        fields.update(shape=tuple(value["shape"]), summary=Summary.from_dict(value["summary"]))
        # True would pass for an extent of 1.
        if not all(type(extent) is int for extent in fields["shape"]):
            raise ValueError(f"its shape is {value['shape']!r}")
        return made_of(cls, fields)


UNMEASURED = Summary(Statistics(), ())
"""Stands for the summary of an entry whose summary is raw."""


class RawEntry(NamedTuple):
    """An entry with its summary as measured, which is smaller and faster to create.

    numbers: the fields of `Statistics`.  sample: in the tensor's element type.
    """

    entry: Entry
    numbers: Sequence[float]
    sample: NDArray[Any]

    def to_entry(self) -> Entry:
        """Return the entry with a summary of its numbers and sample; of complex ones, of magnitudes."""
        sample = self.sample
        with np.errstate(invalid="ignore"):  # a signalling NaN
            values = np.abs(sample) if np.iscomplexobj(sample) else sample
            summary = Summary(Statistics.of_vector(self.numbers), tuple(values.astype(np.float64).tolist()))
        return self.entry._replace(summary=summary)


def op_to_dict(op: Op) -> dict[str, Any]:
    """Return plain values for JSON; ids as text, since 64 bits are more than some readers' numbers hold."""
    forward_id = None if op.of is None else f"{op.of:016x}"
    return {**field_values(op), "id": f"{op.id:016x}", "of": forward_id}


def op_from_dict(value: Mapping[str, Any]) -> Op:
    """Return the op that `op_to_dict` described; raise an error for another content."""
    fields = {name: value[name] for name in Op.__dataclass_fields__ if name in value}
    fields.update({name: fields[name] and int(fields[name], 16) for name in ("id", "of")})
    fields["parameters"] = tuple((int(i), str(path)) for i, path in fields.get("parameters", ()))
    return made_of(Op, fields)


INDEX, NAME, VERSION = "index.json", "dump", 1
INCOMPLETE, FAILED = ".incomplete", "a failed write"
"""An empty file in a folder that lacks what could not be written, and the reason why a tensor is left out."""
_TENSORS = re.compile(r"tensors-\d{5,}\.(safetensors|npz)", re.ASCII)
_MAX_OPEN_FILES = 4


class Dump:
    """Read a dump: its ops and entries, and with `array` the stored tensors.

    op_by_op: names and lines of compiled callables that ran as eager code.  incomplete: True if
    something could not be written, as on a full disk.
    Raises AmandaError for a folder without an index, with one of a newer version, or with one whose entries
    are of other ops or of files elsewhere.

    >>> dump = Dump("dump")  # doctest: +SKIP
    >>> [dump.array(entry) for entry in dump if dump.ops[entry.op].type == "conv2d"]  # doctest: +SKIP
    """

    @checked
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / INDEX
        with naming(path, "read"):
            if not path.exists():
                raise AmandaError(f"{self.folder} has no {INDEX}, so it is no dump of `amanda run dump`")
        self.ops: list[Op]
        self.entries: list[Entry]
        self.op_by_op: list[tuple[str, str]]
        self.ops, self.entries, self.op_by_op = read_json(path, "index of a dump", _read_index)
        for entry in self.entries:
            if not 0 <= entry.op < len(self.ops):
                raise AmandaError(f"{path} has an entry of op {entry.op}, and {len(self.ops)} ops")
            # A name such as ../../secrets must not lead out of the folder.
            if entry.file is not None and not is_tensor_file(entry.file):
                raise AmandaError(f"{path} names {entry.file!r}, which is no file of tensors in its folder")
        # The mark says that the last writing failed, entries say what an earlier one lost.
        has_lost_tensor = any(entry.left_out == FAILED for entry in self.entries)
        self.incomplete = has_lost_tensor or (self.folder / INCOMPLETE).exists()
        # The files read last stay in memory, for a reader that goes through entries in order.
        self._arrays: Callable[[str], Arrays]
        self._arrays = lru_cache(_MAX_OPEN_FILES)(lambda name: read_arrays(Path(folder) / name))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def files(self) -> list[str]:
        """Return the names of the files with tensors."""
        return sorted({entry.file for entry in self.entries if entry.file is not None})

    def array(self, entry: Entry) -> NDArray[Any] | None:
        """Return the numbers of a tensor in its element type (ml_dtypes has those that numpy lacks).

        None if they were not stored.  Raises AmandaError for a file that cannot be read or lacks them.
        """
        if entry.file is None or entry.key is None:
            return None
        arrays = self._arrays(entry.file)
        if entry.key not in arrays:
            raise AmandaError(
                f"{self.folder / entry.file} has no tensor {entry.key!r}, which {INDEX} says that it has"
            )
        try:
            return restore_array(arrays[entry.key], entry.dtype, entry.shape)
        except Exception as error:  # of a type that is none, or a number of bytes beyond all memory
            raise AmandaError(
                f"{self.folder / entry.file} and {INDEX} disagree at {entry.key!r}: {in_words(error)}"
            ) from error


def is_tensor_file(name: str) -> bool:
    """Return True for the name of a file with tensors, the only files of a dump besides its index."""
    return _TENSORS.fullmatch(name) is not None


def _read_index(content: Mapping[str, Any]) -> tuple[list[Op], list[Entry], list[tuple[str, str]]]:
    """Return an index's ops, entries, and callables that ran op by op; raise ValueError for other files."""
    check_schema(content, NAME, VERSION)
    ops, entries = map(op_from_dict, content["ops"]), map(Entry.from_dict, content["entries"])
    return list(ops), list(entries), [(str(name), str(line)) for name, line in content.get("op_by_op", ())]
