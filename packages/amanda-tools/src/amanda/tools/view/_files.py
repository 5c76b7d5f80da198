"""Checked reading of what other tools saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.results import Result, read_json

_NEWEST = {"amanda.trace": 1}
"""Versions of the schemas of which more is read than the table."""


@dataclass(frozen=True)
class Source:
    """One file, or one result that was never in a file.

    name: what people call it.  schema: `amanda.<tool>`.
    """

    name: str
    schema: str
    version: int
    content: Mapping[str, Any]

    def list_of(self, key: str) -> list[dict[str, Any]]:
        """Return the objects under a key.  Raises AmandaError for anything that is no list of objects."""
        values = self.content.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise AmandaError(f"{self.name}: `{key}` is to be a list of objects, as {self.schema} has it")
        return values


def read(result: str | Path | Result) -> Source:
    """Return a file or a result, with its schema known.

    Raises AmandaError where the file cannot be read, is no JSON, or is of a schema or version not known.
    """
    if isinstance(result, Result):
        return _source(result.name, result.to_dict())
    path = Path(result)
    return read_json(path, "file of a result", lambda content: _source(path.name, content))


def _source(name: str, content: Any) -> Source:
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if isinstance(events, list):  # a Chrome trace is an object with a list of events, or the list alone
        raise AmandaError(
            f"{name} is a Chrome trace; open it in https://ui.perfetto.dev. A profile saved as "
            '"profile.json" has the times of the same ops for this page'
        )
    if not isinstance(content, dict):
        raise AmandaError(f"{name} holds {type(content).__name__}, no object with a schema")
    schema, version = content.get("schema"), content.get("version")
    if not isinstance(schema, str) or not schema.startswith("amanda."):
        raise AmandaError(f"{name} has the schema {schema!r}; expected one that begins with 'amanda.'")
    if not isinstance(version, int):
        raise AmandaError(f"{name}: the version of {schema} is {version!r}; expected a whole number")
    if version > _NEWEST.get(schema, version):
        raise AmandaError(
            f"{name} is {schema} {version}, newer than {_NEWEST[schema]}, which this amanda-tools reads: "
            "update amanda-tools"
        )
    return Source(name, schema, version, content)


def by_column(names: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of rows by columns, in which form a page is small; None where a row lacks one."""
    return {name: [row.get(name) for row in rows] for name in names}
