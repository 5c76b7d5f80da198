"""Conversion of text to values of a tool's options, by the annotations of the tool's constructor."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

Given = str | Sequence[Any] | int | float | bool | None
"""A value given for an option: text, or a value that a configuration file has already."""

REQUIRED: Any = inspect.Parameter.empty
_LISTS = {list, tuple, set, frozenset, Sequence, Iterable, typing.Sequence, typing.Iterable}
_TRUTH = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}

_NOT_TEXT = "its values are no text: make the tool in Python"


class Unreadable(ValueError):
    """A value is not of the expected type, which the message names."""


@dataclass(frozen=True)
class Option:
    """One option of a tool: its name, the type of its values, its default (`REQUIRED` without one)."""

    name: str
    type: Any
    default: Any

    @property
    def readable(self) -> bool:
        """True if text can be converted to the option's type."""
        return _is_readable(self.type)

    def read(self, given: Given) -> Any:
        """Return the value; raise Unreadable, which names the expected type."""
        return read(given, self.type)

    def __str__(self) -> str:
        if not self.readable:
            return f"{self.name}, and {_NOT_TEXT}"
        default = "" if self.default is REQUIRED else f" = {_shown(self.default)}"
        return f"{self.name}: {expected(self.type)}{default}"


def options_of(kind: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a tool's constructor by name."""
    target = getattr(kind, "__init__") if isinstance(kind, type) else kind  # noqa: B009
    try:
        hints = typing.get_type_hints(target)
    except Exception:  # such as a name that only type checkers import
        hints = {}
    parameters = inspect.signature(kind).parameters.values()
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return {one.name: Option(one.name, hints.get(one.name, _guess(one)), one.default) for one in named}


def read(given: Given, kind: Any) -> Any:
    """Return a value of a type, from text or from a value of a configuration file. Raises Unreadable."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_first(given, members, kind)
    if origin is Literal:
        return _read_literal(given, members, kind)
    if _is_list(kind):
        return _read_list(given, origin or kind, members, kind)
    if isinstance(given, (list, tuple)):
        if len(given) != 1:
            raise Unreadable(f"expected {expected(kind)}, not several values")
        given = given[0]
    if kind not in _READERS:
        raise Unreadable(_NOT_TEXT)
    expectation, reader = _READERS[kind]
    try:
        return reader(given)
    except (ValueError, TypeError, KeyError):
        raise Unreadable(f"expected {expectation}") from None


def expected(kind: Any) -> str:
    """Return the name of a type for messages."""
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(expected(one) for one in members)
    if origin is Literal:
        return " or ".join(map(_shown, members))
    if _is_list(kind):
        return f"list of {expected(_inner(members))}"
    if kind in _NAMES:
        return _NAMES[kind]
    return getattr(kind, "__name__", str(kind)) if origin is None else str(kind).replace("typing.", "")


def _read_first(given: Given, members: Sequence[Any], kind: Any) -> Any:
    # Text is tried last: 1 and none may be values of another type.
    for member in sorted(members, key=lambda one: one is str):
        with suppress(Unreadable):
            return read(given, member)
    raise Unreadable(f"expected {expected(kind)}" if _is_readable(kind) else _NOT_TEXT)


def _read_literal(given: Given, members: Sequence[Any], kind: Any) -> Any:
    if isinstance(given, list) and len(given) == 1:
        (given,) = given
    for member in members:
        if given == member or (isinstance(given, str) and given == str(member)):
            return member
    near = get_close_matches(str(given), list(map(str, members)), n=1)
    raise Unreadable(f"expected {expected(kind)}" + (f"; did you mean {near[0]}?" if near else ""))


def _read_list(given: Given, origin: Any, members: Sequence[Any], kind: Any) -> Any:
    inner = _inner(members)
    texts: list[Any] = []
    for one in [given] if isinstance(given, str) or not isinstance(given, Sequence) else given:
        # 1e+5 is one number.
        texts += re.split(r"(?<![eE])\+" if inner is float else r"\+", one) if isinstance(one, str) else [one]
    try:
        values = [read(text, inner) for text in texts if text != ""]
    except Unreadable:
        raise Unreadable(f"expected {expected(kind)} (a+b)") from None
    made = origin if origin in (list, tuple, set, frozenset) else list
    return made(values)


def _bool(given: Any) -> bool:
    return given if isinstance(given, bool) else _TRUTH[_str(given).lower()]


def _int(given: Any) -> int:
    if isinstance(given, bool) or (isinstance(given, float) and not given.is_integer()):
        raise ValueError
    return int(given, 0) if isinstance(given, str) else int(given)


def _float(given: Any) -> float:
    if isinstance(given, bool):
        raise TypeError
    return float(given)


def _none(given: Any) -> None:
    if given is not None and _str(given).lower() != "none":
        raise ValueError


def _str(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError
    return given


_READERS: Mapping[Any, tuple[str, Callable[[Any], Any]]] = {
    bool: ("true or false", _bool), int: ("a whole number", _int), float: ("a number", _float),
    str: ("text", _str), Path: ("text", lambda given: Path(_str(given)).expanduser()),
    type(None): ("none", _none), Any: ("text", lambda given: given),
}  # fmt: skip
_NAMES = {kind: words.removeprefix("a ") for kind, (words, _) in _READERS.items()} | {Path: "path"}


def _inner(members: Sequence[Any]) -> Any:
    """Return the type of the elements of a list."""
    return next((one for one in members if one is not Ellipsis), str)


def _is_readable(kind: Any) -> bool:
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_is_readable(one) for one in members if one is not type(None))
    if _is_list(kind):
        return all(_is_readable(one) and not _is_list(one) for one in members if one is not Ellipsis)
    return origin is Literal or kind in _READERS


def _is_list(kind: Any) -> bool:
    return kind in _LISTS or get_origin(kind) in _LISTS


def _guess(parameter: inspect.Parameter) -> Any:
    """Return the type of an option without an annotation that can be read."""
    default = parameter.default
    return type(default) if type(default) in _READERS and default is not None else str


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
