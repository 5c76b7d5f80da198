"""Results of several processes as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

ResultT = TypeVar("ResultT")


@runtime_checkable
class Mergeable(Protocol):
    """A result that can be put together with those of other runs, ranks or processes."""

    def merged(self: ResultT, *others: ResultT) -> ResultT:
        """This and the others as one."""

    @classmethod
    def from_dict(cls: type[ResultT], found: Mapping[str, Any]) -> ResultT:
        """What `to_dict` gave, also in another process; raises ValueError for another schema or version."""


def check_schema(found: Mapping[str, Any], name: str, version: int) -> None:
    """Raise ValueError unless a file's content is of this schema and version."""
    schema = (found.get("schema"), found.get("version")) if isinstance(found, Mapping) else found
    if schema != (f"amanda.{name}", version):
        raise ValueError(f"schema and version are {schema}, not amanda.{name} and {version}")
