"""Reading files of others: what a file comes to is looked at before memory is given to it."""

from __future__ import annotations

import gzip
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from io import BytesIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amanda.errors import AmandaError
from amanda.tools.results._text import amount

TEXT, ARRAYS = 256_000_000, 1_000_000_000
"""Bytes that are read of a file unless `reading` says otherwise: of JSON and the like, and of tensors."""

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20
_chosen: ContextVar[int | None] = ContextVar("amanda_max_bytes", default=None)


class TooLargeError(AmandaError, ValueError):
    """A file comes to more bytes than are read of one."""


@contextmanager
def reading(max_bytes: int | None) -> Iterator[None]:
    """Read files of up to so many bytes, uncompressed; None for what is read without it."""
    token = _chosen.set(max_bytes)
    try:
        yield
    finally:
        _chosen.reset(token)


def check_size(path: Path, size: int, usual: int = ARRAYS) -> None:
    """Raise TooLargeError where a file comes to more bytes than are read.

    usual: the limit where none is chosen.
    """
    limit = _chosen.get() or usual
    if size > limit:
        raise TooLargeError(
            f"{path} comes to {amount(size, 'B')} or more, and at most {amount(limit, 'B')} are read; "
            "the option --limit of the command raises that, and amanda.tools.results.reading(max_bytes=...)"
        )


def check_file(path: Path) -> None:
    """Raise TooLargeError for a file of arrays that is larger itself, and OSError where there is none.

    Raises AmandaError for what is no regular file: a pipe would be waited for.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise AmandaError(f"{path} is no regular file")
    check_size(path, found.st_size)


def read_text(path: Path) -> bytes:
    """Content of a file of text, which may be gzipped.

    Raises TooLargeError, OSError, and ValueError for a gzip file that is damaged.
    """
    check_size(path, path.stat().st_size, TEXT)
    with path.open("rb") as file:  # once: it may be a pipe, whose size is not known before
        raw = file.read((_chosen.get() or TEXT) + 1)
    check_size(path, len(raw), TEXT)
    if raw[:2] != _GZIP:
        return raw
    text = BytesIO()
    try:
        with gzip.GzipFile(fileobj=BytesIO(raw)) as inflated:
            while text.write(inflated.read(_CHUNK)):
                check_size(path, text.tell(), TEXT)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"it is a gzip file that ends too early or is damaged ({error})") from error
    return text.getvalue()


def read_npz(path: Path) -> Mapping[str, NDArray[Any]]:
    """Arrays of an npz file by name.

    Raises TooLargeError, OSError, and anything for another file, or one whose arrays say that they are of
    another size than they are: call it within `parsing`.
    """
    import numpy as np

    check_file(path)
    with zipfile.ZipFile(path) as archive:
        check_size(path, sum(one.file_size for one in archive.infolist()))
        for one in archive.infolist():
            _check_member(archive, one)
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raise ValueError unless the header of an array agrees with how long its member is."""
    from numpy.lib import format as npy

    with archive.open(member) as file:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{member.filename} is of version {version} of npy")
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
        if dtype.hasobject:
            raise ValueError(f"{member.filename} holds objects, and numbers are read alone")
        size, there = prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if size != there:
            raise ValueError(f"{member.filename} is to have {size} bytes of numbers, and has {there}")
