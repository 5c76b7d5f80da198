"""Results with a row for each value of keys that the user chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from amanda.errors import AmandaError
from amanda.tools.results._display import shortened
from amanda.tools.results._files import check_schema, made_of
from amanda.tools.results._result import Column, Result

KeyedT = TypeVar("KeyedT", bound="KeyedResult")
PlaceT = TypeVar("PlaceT")


class KeyedResult(Result):
    """A result with a row for each value of some keys.

    keys: all keys.  counted: the columns after those of the keys.
    """

    keys: ClassVar[Sequence[str]]
    counted: ClassVar[Sequence[Column]]
    width: ClassVar[int] = 44
    """Width of the column of a key."""

    def tell_by(self, by: Sequence[str], subject: str) -> None:
        """Set the keys of rows: their columns, and a title that names them unless they are all keys."""
        self._by, self._subject = tuple(by), subject
        heads = (Column(key, show=partial(shortened, width=self.width)) for key in self._by)
        self.columns = (*heads, *self.counted)  # type: ignore[misc]
        self.title = subject if self._by == tuple(self.keys) else f"{subject} by {', '.join(self._by)}"

    def by(self: KeyedT, *keys: str) -> KeyedT:
        """Return the same result with a row for each value of these keys.

        Raises AmandaError for another key.
        """
        unknown = [key for key in keys if key not in self.keys]
        if unknown or not keys:
            unknown_key = unknown[0] if unknown else "nothing"
            raise AmandaError(f"rows of {self.name} are told by {', '.join(self.keys)}, not by {unknown_key}")
        result = copy(self)
        result.tell_by(keys, self._subject)
        return result

    def grouped(self, places: Iterable[PlaceT]) -> dict[tuple[Any, ...], list[PlaceT]]:
        """Return places grouped by their values of the keys."""
        groups: dict[tuple[Any, ...], list[PlaceT]] = {}
        for place in places:
            groups.setdefault(tuple(getattr(place, key) for key in self._by), []).append(place)
        return groups


class PlacesResult(KeyedResult, Generic[PlaceT]):
    """A result with a row for the places of a program that agree in some keys, and a file with all places.

    place: a dataclass.  summed: fields that are added for places that agree in all other fields.  The
    constructor of a subclass takes places and keys.
    """

    place: ClassVar[type]
    summed: ClassVar[Sequence[str]]
    places: list[PlaceT]

    def merged(self: PlacesT, *results: PlacesT) -> PlacesT:
        """Return this and other runs or ranks as one result: the sums of equal places are added."""
        zeros = dict.fromkeys(self.summed, 0)
        sums: dict[tuple[Any, ...], Any] = {}
        for place in (place for result in (self, *results) for place in result.places):
            empty = replace(place, **zeros)
            total = sums.setdefault(tuple(_field_values(empty).values()), empty)
            for name in self.summed:
                setattr(total, name, getattr(total, name) + getattr(place, name))
        return self._from_places(sums.values(), self._by)

    @classmethod
    def from_dict(cls: type[PlacesT], content: Mapping[str, Any]) -> PlacesT:
        """Return the result that `to_dict` described; raise ValueError for other schemas, newer versions."""
        check_schema(content, cls.name, cls.version)
        places: list[Any] = [made_of(cls.place, place) for place in content["places"]]
        return cls._from_places(places, content.get("by", cls.keys))

    def facts(self) -> Mapping[str, Any]:
        """Return the keys of rows, and each place."""
        return {"by": self._by, "places": [_field_values(place) for place in self.places]}

    @classmethod
    def _from_places(cls: type[PlacesT], places: Iterable[Any], by: Sequence[str]) -> PlacesT:
        kind: Any = cls
        result: PlacesT = kind(places, by)
        return result


PlacesT = TypeVar("PlacesT", bound="PlacesResult[Any]")


def _field_values(place: Any) -> dict[str, Any]:
    return {field.name: getattr(place, field.name) for field in fields(place)}
