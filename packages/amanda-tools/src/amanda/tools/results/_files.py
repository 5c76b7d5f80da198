"""Reading and writing of files: sizes and contents are checked, and errors name the file."""

from __future__ import annotations

import gzip
import json
import math
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields
from functools import cache
from io import BytesIO
from itertools import chain
from math import prod
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from amanda.errors import AmandaError, FileError
from amanda.files import naming
from amanda.tools.results._display import amount

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXT, ARRAYS = 256_000_000, 1_000_000_000
"""Bytes that are read of a file unless `reading` says otherwise: of JSON and the like, and of tensors."""

_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20
_max_bytes: ContextVar[int | None] = ContextVar("amanda_max_bytes", default=None)


class TooLargeError(AmandaError, ValueError, module="amanda.tools.results"):
    """A file has more bytes than the limit."""


@contextmanager
def reading(max_bytes: int | None) -> Iterator[None]:
    """Set the limit of bytes of files, uncompressed, inside the context; None for the default limits."""
    # A context variable, so that threads and tasks have limits of their own.
    token = _max_bytes.set(max_bytes)
    try:
        yield
    finally:
        _max_bytes.reset(token)


def check_size(path: Path, size: int, default_limit: int = ARRAYS) -> None:
    """Raise TooLargeError for a file with more bytes than the limit.

    Args:
        path: File, for the message.
        size: Bytes of the file, uncompressed, or as many as were read.
        default_limit: Limit in bytes outside of `reading`.
    """
    limit = _max_bytes.get() or default_limit
    if size > limit:
        raise TooLargeError(
            f"{path} comes to {amount(size, 'B')} or more, and at most {amount(limit, 'B')} are read; "
            "the option --limit of the command raises that, and amanda.tools.results.reading(max_bytes=...)"
        )


def check_file(path: Path) -> None:
    """Raise TooLargeError for a file of arrays that is too large, and OSError for a missing file.

    Raises AmandaError for anything but a regular file: reading a pipe would block.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise AmandaError(f"{path} is no regular file")
    check_size(path, status.st_size)


def read_text(path: Path) -> bytes:
    """Return a file's bytes, inflated; raise TooLargeError, OSError, ValueError for a damaged gzip file."""
    check_size(path, path.stat().st_size, TEXT)
    with path.open("rb") as file:  # once: it may be a pipe, whose size is not known before
        # One byte more than allowed tells that there is more.
        raw = file.read((_max_bytes.get() or TEXT) + 1)
    check_size(path, len(raw), TEXT)
    if raw[:2] != _GZIP:
        return raw
    text = BytesIO()
    try:
        # Piece by piece: a small file may inflate to more than the memory.
        with gzip.GzipFile(fileobj=BytesIO(raw)) as inflated:
            while text.write(inflated.read(_CHUNK)):
                check_size(path, text.tell(), TEXT)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"it is a gzip file that ends too early or is damaged ({error})") from error
    return text.getvalue()


def read_npz(path: Path) -> Mapping[str, NDArray[Any]]:
    """Return the arrays of an npz file by name.

    Raises TooLargeError, OSError, and anything for another file, or one whose arrays say that they are of
    another size than they are: call it within `parsing`.
    """
    import numpy as np

    check_file(path)
    with zipfile.ZipFile(path) as archive:
        # The sizes that the archive states; the headers are checked against them below.
        check_size(path, sum(member.file_size for member in archive.infolist()))
        for member in archive.infolist():
            _check_array_header(archive, member)
    # Unpickling runs code of whoever wrote the file.
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _check_array_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raise ValueError unless the header of an array agrees with how long its member is."""
    from numpy.lib import format as npy

    with archive.open(member) as file:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{member.filename} is of version {version} of npy")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError(f"{member.filename} holds objects, and numbers are read alone")
        header_size, stored_size = prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if header_size != stored_size:
            raise ValueError(
                f"{member.filename} is to have {header_size} bytes of numbers, and has {stored_size}"
            )


T = TypeVar("T")

_PLAIN = {str: (str,), int: (int,), float: (int, float), bool: (bool,), type(None): (type(None),)}


def made_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a new record, `kind(**values)`, whose values are checked against the annotations of its class.

    Args:
        kind: Class of the record.
        values: By field.

    Raises:
        ValueError: For a value of another plain type.
        TypeError: For a missing or an unknown field.
    """
    record_class: Any = kind
    for name, types in _plain_types_by_field(record_class).items():
        value = values.get(name)
        # True passes for a number in Python, and is none in a file.
        if name in values and (not isinstance(value, types) or (type(value) is bool and bool not in types)):
            raise ValueError(f"its {name} is {value!r}")
    return kind(**values)


@cache
def _plain_types_by_field(record_class: Any) -> dict[str, tuple[type, ...]]:
    """Return the types that a value may have, by the field; fields of other than plain types are left out."""
    types_by_field = {}
    for name, hint in get_type_hints(record_class).items():
        alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(alternative in _PLAIN for alternative in alternatives):
            types_by_field[name] = tuple(chain.from_iterable(map(_PLAIN.__getitem__, alternatives)))
    return types_by_field


def field_values(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; values are not copied, as asdict would."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@contextmanager
def parsing(path: str | Path, noun: str, kind: type[AmandaError] = AmandaError) -> Iterator[None]:
    """Raise an error that names a file for any error of reading a damaged or crafted file.

    Args:
        path: File that is read.
        noun: Kind of file, for messages: "bundle of amanda diff".
        kind: Class of the error; FileError, for what cannot be read, and TooLargeError stay what they are.
    """
    try:
        with naming(path, "read"):
            yield
    except (FileError, TooLargeError):
        raise
    except Exception as error:  # of parsers, decompressors and numbers: their kinds are not listed anywhere
        if isinstance(error, kind) and str(path) in str(error):
            raise
        raise kind(f"{path} is no {noun} that can be read: {in_words(error)}") from error


def read_json(
    path: str | Path, noun: str, make: Callable[[Any], T], kind: type[AmandaError] = AmandaError
) -> T:
    """Return `make(content)` for the content of a JSON file.

    Args:
        path: File, which may be gzipped.
        noun: Kind of file, for messages: "file of statistics".
        make: Called with the content; may raise anything for another one.
        kind: Class of the error.

    Raises:
        TooLargeError: For a file that is larger than the limit.
        FileError: Where the file cannot be read.
        AmandaError: Of the class `kind`, for any other file.
    """
    with parsing(path, noun, kind):
        text = read_text(Path(path))
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no JSON ({error})") from error
        return make(content)


def to_json(content: Any, indent: int | None = None) -> str:
    """Return JSON; NaN and infinities are the words "nan", "inf" and "-inf".

    Args:
        content: Plain values.
        indent: Spaces for each level; None for a single line.

    >>> to_json({"loss": float("nan")})
    '{"loss": "nan"}'
    """
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_with_number_words(content), indent=indent, allow_nan=False)


def _with_number_words(content: Any) -> Any:
    """Return plain values with words for NaN and infinities; tuples become lists."""
    if isinstance(content, float):
        return content if math.isfinite(content) else str(float(content))
    if isinstance(content, Mapping):
        return {_with_number_words(key): _with_number_words(value) for key, value in content.items()}
    return [_with_number_words(value) for value in content] if isinstance(content, (list, tuple)) else content


def number_of(value: Any) -> Any:
    """Return the number that a word of `to_json` stands for; anything else as it is."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


def check_schema(content: Any, name: str, version: int, oldest: int = 1) -> int:
    """Return the version of a file's content, so that a reader can tell an older one.

    Args:
        content: What the file holds.
        name: Schema, which is `amanda.<name>`.
        version: The present version.
        oldest: The first version that the reader knows.

    Raises:
        ValueError: For another schema, and for a version that is newer than the present or not known.
    """
    schema, file_version = schema_of(content), content.get("version")
    if schema != f"amanda.{name}":
        raise ValueError(f"its schema is {schema!r}, not 'amanda.{name}'")
    # Not isinstance, since True would be version 1.
    if type(file_version) is int and oldest <= file_version <= version:
        return file_version
    supported = f"version {version} is" if oldest == version else f"versions {oldest} to {version} are"
    is_newer = type(file_version) is int and file_version > version
    hint = "; it is newer: update the distribution of the tool, such as amanda-tools" if is_newer else ""
    raise ValueError(f"it is version {file_version!r} of {schema}, and {supported} read here{hint}")


def schema_of(content: Any) -> str:
    """Return the schema that a file's content names; raise ValueError if it is none of Amanda's."""
    if not isinstance(content, Mapping):
        raise ValueError("it holds no object with a schema")
    schema = content.get("schema")
    if not isinstance(schema, str):
        raise ValueError("it names no schema, as what a result's save() writes does")
    if not schema.startswith("amanda."):
        raise ValueError(f"its schema is {schema!r}; expected one that begins with 'amanda.'")
    return schema


def in_words(error: Exception) -> str:
    """Return the reason of an error as the end of a sentence, such as "it lacks 'rows'"."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, (ValueError, AmandaError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


_PATIENCE = 60.0
"""Seconds to wait for a lock."""
_SUFFIX = ".lock"


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock of a path; wait until other processes and threads release it.

    The lock is a hidden file beside the path, removed afterwards.
    Raises FileError if it cannot be created, or if another process holds it for a minute.
    """
    from filelock import FileLock, Timeout

    path = Path(path)
    # Shortened, since names of files end at 255 bytes.
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
