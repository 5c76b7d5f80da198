"""Results that are told by keys of one's choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, ClassVar, TypeVar

from amanda.errors import AmandaError
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
