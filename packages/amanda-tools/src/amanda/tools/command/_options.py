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
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from amanda import options
from amanda.options import REQUIRED, Mismatch, kind_of

Given = str | Sequence[Any] | int | float | bool | None
"""A value given for an option: text, or a value that a configuration file has already."""

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

    def read(self, value: Given) -> Any:
        """Return the value; raise Unreadable, which names the expected type."""
        return read(value, self.type)

    def __str__(self) -> str:
        if not self.readable:
            return f"{self.name}, and {_NOT_TEXT}"
        default = "" if self.default is REQUIRED else f" = {_default_text(self.default)}"
        return f"{self.name}: {kind_of(self.type).text}{default}"


def options_of(kind: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a tool's constructor by name."""
    return {
        name: Option(name, _guess(option), option.default)
        for name, option in options.options_of(kind).items()
    }


def read(value: Given, annotation: Any) -> Any:
    """Return a value of a type, from text or from a value of a configuration file. Raises Unreadable."""
    converted, kind = _convert(value, annotation), kind_of(annotation)
    try:
        return kind.accept(converted)
    except Mismatch as mismatch:
        raise _unreadable(annotation, str(mismatch)) from None


def _convert(value: Given, annotation: Any) -> Any:
    plain = _plain(annotation)
    origin, members = get_origin(plain), get_args(plain)
    if origin in (Union, types.UnionType):
        return _read_first(value, members, annotation)
    if origin is Literal:
        return _read_literal(value, members, annotation)
    if _is_list(plain):
        return _read_list(value, origin or plain, members, annotation)
    if isinstance(value, (list, tuple)):
        if len(value) != 1:
            raise Unreadable(f"expected {kind_of(annotation).text}, not several values")
        value = value[0]
    if plain not in _READERS:
        raise Unreadable(_NOT_TEXT)
    try:
        return _READERS[plain](value)
    except (ValueError, TypeError, KeyError):
        raise _unreadable(annotation) from None


def _unreadable(annotation: Any, why: str = "") -> Unreadable:
    kind = kind_of(annotation)
    expected = kind.words if kind.words.endswith(kind.text) else kind.text
    return Unreadable(f"expected {expected}" + (f" ({why})" if why else ""))


def _read_first(value: Given, members: Sequence[Any], annotation: Any) -> Any:
    # Text is tried last: 1 and none may be values of another type.
    for member in sorted(members, key=lambda kind: _plain(kind) is str):
        with suppress(Unreadable):
            return read(value, member)
    raise _unreadable(annotation) if _is_readable(annotation) else Unreadable(_NOT_TEXT)


def _read_literal(value: Given, members: Sequence[Any], annotation: Any) -> Any:
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    for member in members:
        if value == member or (isinstance(value, str) and value == str(member)):
            return member
    near = get_close_matches(str(value), list(map(str, members)), n=1)
    expected = f"expected {kind_of(annotation).text}"
    raise Unreadable(expected + (f"; did you mean {near[0]}?" if near else ""))


def _read_list(value: Given, origin: Any, members: Sequence[Any], annotation: Any) -> Any:
    inner = _element_type(members)
    texts: list[Any] = []
    for text in [value] if isinstance(value, str) or not isinstance(value, Sequence) else value:
        # 1e+5 is one number.
        pattern = r"(?<![eE])\+" if _plain(inner) is float else r"\+"
        texts += re.split(pattern, text) if isinstance(text, str) else [text]
    try:
        values = [read(text, inner) for text in texts if text != ""]
    except Unreadable:
        raise Unreadable(f"expected {kind_of(annotation).text} (a+b)") from None
    container = origin if origin in (list, tuple, set, frozenset) else list
    return container(values)


def _bool(value: Any) -> bool:
    return value if isinstance(value, bool) else _TRUTH[_str(value).lower()]


def _int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError
    return int(value, 0) if isinstance(value, str) else int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _none(value: Any) -> None:
    if value is not None and _str(value).lower() != "none":
        raise ValueError


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _path(value: Any) -> Path | str:
    return Path(value).expanduser() if _str(value) else ""  # Path("") would be the working directory


_READERS: Mapping[Any, Callable[[Any], Any]] = {
    bool: _bool, int: _int, float: _float, str: _str, Path: _path, type(None): _none,
    Any: lambda given: given,
}  # fmt: skip


def _plain(annotation: Any) -> Any:
    """Return the type of an annotation that may state a range."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _element_type(members: Sequence[Any]) -> Any:
    """Return the type of the elements of a list."""
    return next((member for member in members if member is not Ellipsis), str)


def _is_readable(annotation: Any) -> bool:
    plain = _plain(annotation)
    origin, members = get_origin(plain), get_args(plain)
    if origin in (Union, types.UnionType):
        return any(_is_readable(member) for member in members if member is not type(None))
    if _is_list(plain):
        elements = [member for member in members if member is not Ellipsis]
        return all(_is_readable(element) and not _is_list(_plain(element)) for element in elements)
    return origin is Literal or plain in _READERS


def _is_list(plain: Any) -> bool:
    return plain in _LISTS or get_origin(plain) in _LISTS


def _guess(option: options.Option) -> Any:
    """Return the annotation of an option, or the type of its default where no annotation can be read."""
    if option.annotation is not inspect.Parameter.empty:
        return option.annotation
    return type(option.default) if type(option.default) in _READERS and option.default is not None else str


def _default_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
