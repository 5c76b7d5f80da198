"""Results with a row for each value of some keys, or for each module of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from amanda.errors import AmandaError
from amanda.tools.results._files import check_schema, made_of
from amanda.tools.results._result import Column, Result
from amanda.tools.results._tree import ModuleNode

_Numbers: TypeAlias = Callable[[ModuleNode], Sequence[Any]]


class TreeResult(Result):
    """A row for each module, with the sums of the modules within, and the notes of the result of all ops.

    `print` shows the modules as a tree; repeated layers, such as layers.0-15, are one row.
    """

    _combines = False

    def __init__(self, result: Any, depth: int | None, columns: Sequence[Column], numbers: _Numbers) -> None:
        root = ModuleNode.of(result.ops)
        depth = root.readable_depth() if depth is None else depth
        self._nodes, self._numbers, self._result = list(root.walk(depth)), numbers, result
        labels = {node.path: f"{'  ' * level}{node.name or 'total'}" for level, node in self._nodes}
        self.name, self.remarks = f"{result.name}.tree", result.remarks  # type: ignore[misc]
        self.title = f"{result._subject} by module"
        self.columns = (Column("module", show=labels.__getitem__), *columns)  # type: ignore[misc]

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each module, a module before those within; "" is all that was executed."""
        return [(node.path, *self._numbers(node)) for _, node in self._nodes]

    @property
    def _leading(self) -> int:
        """As many as in the result of all ops."""
        leading: int = self._result._leading
        return leading

    def notes(self) -> Sequence[str]:
        """Return the notes of the result of all ops."""
        notes: Sequence[str] = self._result.notes()
        return notes


KeyedT = TypeVar("KeyedT", bound="KeyedResult")
PlaceT = TypeVar("PlaceT")


class KeyedResult(Result):
    """A result with a row for each value of some keys.

    keys: all keys.  _counted: the columns after those of the keys.
    """

    keys: ClassVar[Sequence[str]]
    _counted: ClassVar[Sequence[Column]]

    def _set_keys(self, by: Sequence[str], subject: str) -> None:
        """Set the keys of rows: their columns, and a title that names them unless they are all keys."""
        self._by, self._subject = tuple(by), subject
        self.columns = (*map(Column, self._by), *self._counted)  # type: ignore[misc]
        self.title = subject if self._by == tuple(self.keys) else f"{subject} by {', '.join(self._by)}"

    def by(self: KeyedT, *keys: str) -> KeyedT:
        """Return the same result with a row for each value of these keys.

        Raises AmandaError for another key.
        """
        unknown = [key for key in keys if key not in self.keys]
        if unknown or not keys:
            unknown_key = unknown[0] if unknown else "nothing"
            raise AmandaError(f"rows of {self.name} have the keys {', '.join(self.keys)}, not {unknown_key}")
        # Shallow: places are shared, keys and columns are the copy's own.
        result = copy(self)
        result._set_keys(keys, self._subject)
        return result

    def _tree(self: Any, depth: int | None, columns: Sequence[Column], numbers: _Numbers) -> TreeResult:
        """Return a row for each module: its path, and numbers of a node for the columns."""
        return TreeResult(self, depth, columns, numbers)

    def _grouped(self, places: Iterable[PlaceT]) -> dict[tuple[Any, ...], list[PlaceT]]:
        """Return places grouped by their values of the keys."""
        groups: dict[tuple[Any, ...], list[PlaceT]] = {}
        for place in places:
            groups.setdefault(tuple(getattr(place, key) for key in self._by), []).append(place)
        return groups


class PlacesResult(KeyedResult, Generic[PlaceT]):
    """A result with a row for the places of a program that agree in some keys, and a file with all places.

    _op_class: a dataclass.  _summed: fields that are added for ops that agree in all other fields.  The
    constructor of a subclass takes ops and keys.
    """

    _op_class: ClassVar[type]
    _summed: ClassVar[Sequence[str]]
    ops: list[PlaceT]

    def merged(self: PlacesT, *results: PlacesT) -> PlacesT:
        """Return this and other runs or ranks as one result: the sums of equal places are added."""
        zeros = dict.fromkeys(self._summed, 0)
        sums: dict[tuple[Any, ...], Any] = {}
        for place in (place for result in (self, *results) for place in result.ops):
            empty = replace(place, **zeros)
            # An empty place is a copy, so that merging changes none of the results.
            total = sums.setdefault(tuple(_field_values(empty).values()), empty)
            for name in self._summed:
                setattr(total, name, getattr(total, name) + getattr(place, name))
        merged = copy(self)
        merged.ops = list(sums.values())
        return merged

    @classmethod
    def from_dict(cls: type[PlacesT], content: Mapping[str, Any]) -> PlacesT:
        """Return the result that `to_dict` described; raise ValueError for other schemas, newer versions."""
        check_schema(content, cls.name, cls.version)
        places: list[Any] = [made_of(cls._op_class, place) for place in content["places"]]
        result_class: Any = cls
        result: PlacesT = result_class(places, content.get("by", cls.keys))
        return result

    def _facts(self) -> Mapping[str, Any]:
        """Return what files contain besides rows: the keys, and all places."""
        return {"by": self._by, "places": [_field_values(place) for place in self.ops]}


PlacesT = TypeVar("PlacesT", bound="PlacesResult[Any]")


def _field_values(place: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; values are not copied, as asdict would."""
    return {field.name: getattr(place, field.name) for field in fields(place)}
