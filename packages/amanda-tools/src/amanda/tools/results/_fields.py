"""Objects of plain values, made of what a file tells."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import chain
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_PLAIN = {str: (str,), int: (int,), float: (int, float), bool: (bool,), type(None): (type(None),)}


def made_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return `kind(**values)`, for a class whose annotations say of which types its fields are.

    Raises ValueError for text, numbers or None in the place of another of these; TypeError for a missing or
    an unknown field.
    """
    hashable: Any = kind
    for name, types in _types(hashable).items():
        value = values.get(name)
        if name in values and (not isinstance(value, types) or (type(value) is bool and bool not in types)):
            raise ValueError(f"its {name} is {value!r}")
    return kind(**values)


@cache
def _types(kind: Any) -> dict[str, tuple[type, ...]]:
    """Return the types of the values that each field of plain types may have."""
    types = {}
    for name, hint in get_type_hints(kind).items():
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if all(part in _PLAIN for part in parts):
            types[name] = tuple(chain.from_iterable(_PLAIN[part] for part in parts))
    return types
