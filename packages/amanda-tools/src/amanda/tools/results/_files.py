"""Reading what was saved as JSON, with nothing believed that was not looked at."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from amanda.errors import AmandaError
from amanda.tools.results._limits import read_text

T = TypeVar("T")


def read_json(path: str | Path, what: str, make: Callable[[Any], T]) -> T:
    """Return `make(content)` for the content of a JSON file, which may be gzipped.

    what: such a file, for messages: "file of statistics".
    Raises TooLargeError, and AmandaError where there is none, and where it is another: for what `make`
    raises of a content that it does not know, such as ValueError.
    """
    path = Path(path)
    try:
        text = read_text(path)
    except (EOFError, zlib.error) as error:
        raise AmandaError(f"{path} is a gzip file that ends too early or is damaged: {error}") from error
    except OSError as error:
        raise AmandaError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AmandaError(f"{path} is no {what} that can be read: it is no JSON ({error})") from error
    try:
        return make(content)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AmandaError(f"{path} is no {what} that can be read: {in_words(error)}") from error


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
    if isinstance(error, (ValueError, AmandaError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"
