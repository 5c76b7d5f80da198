"""Results that are told by keys of one's choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from amanda.errors import AmandaError
from amanda.tools.results._fields import made_of
from amanda.tools.results._files import check_schema
from amanda.tools.results._result import Column, Result
from amanda.tools.results._text import shortened

KeyedT = TypeVar("KeyedT", bound="KeyedResult")
PlaceT = TypeVar("PlaceT")


class KeyedResult(Result):
    """A result with a row for each value of some keys.

    keys: all that there are.  counted: the columns behind those of the keys.
    """

    keys: ClassVar[Sequence[str]]
    counted: ClassVar[Sequence[Column]]
    width: ClassVar[int] = 44
    """Of the column of a key."""

    def tell_by(self, by: Sequence[str], subject: str) -> None:
        """Take keys: columns for them, and a title that names them, unless they are all."""
        self._by, self._subject = tuple(by), subject
        heads = (Column(key, show=partial(shortened, width=self.width)) for key in self._by)
        self.columns = (*heads, *self.counted)  # type: ignore[misc]
        self.title = subject if self._by == tuple(self.keys) else f"{subject} by {', '.join(self._by)}"

    def by(self: KeyedT, *keys: str) -> KeyedT:
        """The same with a row for each value of these keys, of `keys`.

        Raises AmandaError for another key.
        """
        unknown = [key for key in keys if key not in self.keys]
        if unknown or not keys:
            other = unknown[0] if unknown else "nothing"
            raise AmandaError(f"rows of {self.name} are told by {', '.join(self.keys)}, not by {other}")
        told = copy(self)
        told.tell_by(keys, self._subject)
        return told

    def grouped(self, places: Iterable[PlaceT]) -> dict[tuple[Any, ...], list[PlaceT]]:
        """Places by what they have of the keys."""
        groups: dict[tuple[Any, ...], list[PlaceT]] = {}
        for place in places:
            groups.setdefault(tuple(getattr(place, key) for key in self._by), []).append(place)
        return groups


class PlacesResult(KeyedResult, Generic[PlaceT]):
    """A result with a row for the places of a program that agree in some keys, and a file with all places.

    place: a dataclass.  summed: its fields that are added up where places agree in the others.  A subclass is
    made of places and keys.
    """

    place: ClassVar[type]
    summed: ClassVar[Sequence[str]]
    places: list[PlaceT]

    def merged(self: PlacesT, *others: PlacesT) -> PlacesT:
        """Return this and other runs or ranks as one: what is summed of equal places adds up."""
        zeros = dict.fromkeys(self.summed, 0)
        found: dict[tuple[Any, ...], Any] = {}
        for one in (place for result in (self, *others) for place in result.places):
            empty = replace(one, **zeros)
            known = found.setdefault(tuple(_fields(empty).values()), empty)
            for name in self.summed:
                setattr(known, name, getattr(known, name) + getattr(one, name))
        return self._of(found.values(), self._by)

    @classmethod
    def from_dict(cls: type[PlacesT], found: Mapping[str, Any]) -> PlacesT:
        """Return what `to_dict` was asked of; raises ValueError for another schema or a newer version."""
        check_schema(found, cls.name, cls.version)
        return cls._of([made_of(cls.place, place) for place in found["places"]], found.get("by", cls.keys))

    def facts(self) -> Mapping[str, Any]:
        """The keys of rows, and each place."""
        return {"by": self._by, "places": [_fields(place) for place in self.places]}

    @classmethod
    def _of(cls: type[PlacesT], places: Iterable[Any], by: Sequence[str]) -> PlacesT:
        kind: Any = cls
        made: PlacesT = kind(places, by)
        return made


PlacesT = TypeVar("PlacesT", bound="PlacesResult[Any]")


def _fields(place: Any) -> dict[str, Any]:
    return {one.name: getattr(place, one.name) for one in fields(place)}
