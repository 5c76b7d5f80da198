"""Reading and writing of files: nothing is believed that was not looked at, and errors name the file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from amanda.errors import AmandaError, FileError
from amanda.files import naming
from amanda.tools.results._limits import TooLargeError, read_text

T = TypeVar("T")

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@contextmanager
def parsing(path: str | Path, what: str, kind: type[AmandaError] = AmandaError) -> Iterator[None]:
    """Raise an error that names a file, whatever the reading of a damaged or crafted file raises.

    what: such a file, for messages: "bundle of amanda diff".  kind: of the error; a FileError where the file
    itself cannot be read, and a TooLargeError, stay what they are.
    """
    try:
        with naming(path, "read"):
            yield
    except (FileError, TooLargeError):
        raise
    except Exception as error:  # of parsers, decompressors and numbers: their kinds are not listed anywhere
        if isinstance(error, kind) and str(path) in str(error):
            raise
        raise kind(f"{path} is no {what} that can be read: {in_words(error)}") from error


def read_json(
    path: str | Path, what: str, make: Callable[[Any], T], kind: type[AmandaError] = AmandaError
) -> T:
    """Return `make(content)` for the content of a JSON file, which may be gzipped.

    what: such a file, for messages: "file of statistics".  make: may raise anything for another content.
    kind: of the error.
    Raises TooLargeError, FileError where the file cannot be read, and an error of the kind for another one.
    """
    with parsing(path, what, kind):
        text = read_text(Path(path))
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no JSON ({error})") from error
        return make(content)


def to_json(content: Any, indent: int | None = None) -> str:
    """Return JSON of plain values; NaN and infinities are the words "nan", "inf" and "-inf".

    >>> to_json({"loss": float("nan")})
    '{"loss": "nan"}'
    """
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_in_words(content), indent=indent, allow_nan=False)


def _in_words(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else str(float(content))
    if isinstance(content, Mapping):
        return {_in_words(key): _in_words(value) for key, value in content.items()}
    return [_in_words(value) for value in content] if isinstance(content, (list, tuple)) else content


def number_of(value: Any) -> Any:
    """Return the number that a word of `to_json` stands for; anything else as it is."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


def check_schema(found: Any, name: str, version: int, oldest: int = 1) -> int:
    """Return the version of a file's content, so that a reader can tell an older one.

    name: of the schema, `amanda.<name>`.  version: the present one.  oldest: the first that the reader knows.
    Raises ValueError for another schema, and for a version that is newer than the present or not known.
    """
    schema, given = schema_of(found), found.get("version")
    if schema != f"amanda.{name}":
        raise ValueError(f"its schema is {schema!r}, not 'amanda.{name}'")
    if type(given) is int and oldest <= given <= version:
        return given
    known = f"version {version} is" if oldest == version else f"versions {oldest} to {version} are"
    newer = type(given) is int and given > version
    hint = "; it is newer: update the distribution of the tool, such as amanda-tools" if newer else ""
    raise ValueError(f"it is version {given!r} of {schema}, and {known} read here{hint}")


def schema_of(found: Any) -> str:
    """The schema that a file's content names. Raises ValueError where it names none."""
    if not isinstance(found, Mapping):
        raise ValueError("it holds no object with a schema")
    if not isinstance(found.get("schema"), str):
        raise ValueError("it names no schema, as what a result's save() writes does")
    return str(found["schema"])


def in_words(error: Exception) -> str:
    """Return a sentence about a content that cannot be read."""
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
