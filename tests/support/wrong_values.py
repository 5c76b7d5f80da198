"""Values of classes that options may be given by mistake, and what annotations allow, read anew."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from math import inf, isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from amanda.options import Length, Range, Where


class Unlike:
    """An object that no option takes."""


def recursive() -> list[Any]:
    items: list[Any] = [1]
    items.append(items)
    return items


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "False": lambda: False, "an int": lambda: 3,
    "a negative int": lambda: -1, "zero": lambda: 0, "a huge int": lambda: 10**30,
    "an int without a repr": lambda: 10**5000, "a float": lambda: 0.3, "a negative float": lambda: -0.5,
    "a whole float": lambda: 2.0, "nan": lambda: nan, "inf": lambda: inf, "-inf": lambda: -inf,
    "a text": lambda: "xyzzy", "an empty text": lambda: "", "a number as text": lambda: "1",
    "a word in capitals": lambda: "FORWARD", "bytes": lambda: b"forward", "a list": lambda: [1],
    "an empty list": list, "a list of nan": lambda: [nan], "a nested list": lambda: [[1], [2]],
    "a recursive list": recursive, "a tuple": lambda: (0.5, -1), "a dict": lambda: {"a": "b"},
    "a set": lambda: {1}, "an object": Unlike, "a class": lambda: Unlike, "a function": lambda: lambda: None,
    "a generator": lambda: (one for one in (1, 2)), "a complex": lambda: 1 + 2j,
    "a Decimal": lambda: Decimal("0.5"), "a Fraction": lambda: Fraction(1, 2),
    "an array": lambda: np.arange(3.0), "a bool of numpy": lambda: np.bool_(True),
    "nan of numpy": lambda: np.float32(nan), "a path of nothing": lambda: Path("/there/is/nothing"),
    "a path of a folder": lambda: Path("/usr"),
}  # fmt: skip

TEXTS = (
    "", "none", "true", "1", "0", "-1", "1.5", "nan", "inf", "-inf", "1e400", "xyzzy", "FORWARD", "1+x", "+",
    "0x10", "99999999999999999999999", "[1]", "/there/is/nothing", "/usr", "1,2", "é\u202e", "a=b", "None",
    "object()",
)  # fmt: skip


def allows(annotation: Any, value: Any, marks: tuple[Any, ...] = ()) -> bool:
    """Return True if an annotation plainly allows a value; written apart from `amanda.options.kinds`."""
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allows(members[0], value, (*marks, *annotation.__metadata__))
    conditions = [mark for mark in marks if isinstance(mark, Where)]
    if conditions:
        others = tuple(mark for mark in marks if not isinstance(mark, Where))
        return allows(annotation, value, others) and all(one.holds(value) for one in conditions)
    if origin in (Union, types.UnionType):
        return any(allows(member, value, marks) for member in members)
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in members)
    bounds = next((mark for mark in marks if isinstance(mark, Range)), Range(-(2**63), 2**63 - 1))
    length = next((mark for mark in marks if isinstance(mark, Length)), Length())
    if annotation is bool:
        return value is True or value is False
    if annotation in (None, type(None)):
        return value is None
    if annotation is int:
        return type(value) is int and bounds.least <= value <= bounds.most
    if annotation is float:
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
            return False
        if isinstance(value, int) and abs(value) > 10**300:
            return False
        if not isfinite(value):
            return not bounds.finite
        return bounds.least <= value <= bounds.most and bounds.above < value < bounds.below
    if annotation is str:
        return isinstance(value, str) and len(value) >= length.least
    if annotation in (Any, object):
        return True
    if isinstance(annotation, TypeVar):
        return annotation.__bound__ is None or allows(annotation.__bound__, value)
    plain = origin or annotation
    if plain in (list, Sequence, Collection, Iterable):
        is_list = isinstance(value, (list, tuple)) or (
            plain not in (list, Sequence)
            and isinstance(value, Iterable)
            and not isinstance(value, (str, bytes))
        )
        if not is_list or not isinstance(value, (list, tuple)):
            return is_list
        return len(value) >= length.least and all(allows(members[0], one) for one in value)
    if plain is tuple and members[-1] is Ellipsis:
        return isinstance(value, (tuple, list))
    if plain is tuple:
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(members)
            and all(map(allows, members, value))
        )
    if isinstance(plain, type) and issubclass(plain, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else [(None, None)]
        return all(allows(members[0], key) and allows(members[1], one) for key, one in pairs)
    if plain is Callable or plain is typing.Callable:
        return callable(value)
    if isinstance(plain, type) and issubclass(plain, os.PathLike):
        return isinstance(value, (str, Path)) and str(value) != ""
    if getattr(plain, "_is_protocol", False):
        return not isinstance(value, type) and all(
            hasattr(value, one) for one in vars(plain) if one[0] != "_"
        )
    return isinstance(value, plain) if isinstance(plain, type) else False
