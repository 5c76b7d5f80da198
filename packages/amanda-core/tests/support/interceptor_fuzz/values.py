"""Arguments of every shape, made anew each time, and what came of a call, to compare with another."""

from __future__ import annotations

import array
import io
import re
import sys
from collections.abc import Callable
from typing import Any

from .kinds import ArrayHeir, HeapHeir, Identity, Plain, StaticHeir, Target, builtin_kinds


class SubList(list[Any]):
    """A list that is not exactly one."""


class Choices:
    """Decisions read from bytes; nothing but zeros after their end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, count: int) -> int:
        """A number from 0 up to count."""
        self._at += 1
        return (self._data[self._at - 1] if self._at <= len(self._data) else 0) % count

    def one_of(self, options: Any) -> Any:
        """One of them."""
        return options[self.below(len(options))]

    @property
    def left(self) -> bool:
        """Whether there are bytes to decide by."""
        return self._at < len(self._data)


class Inner:
    """Calls another callable with its sample arguments when it is called."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __call__(self, *_: Any) -> Any:
        return outcome(lambda: self._target(*self._target.sample(), **self._target.keywords))

    def __repr__(self) -> str:
        return f"Inner({self._target.name})"


class Failing:
    """Raises when it is called, compared or asked for its length."""

    def __call__(self, *_: Any) -> Any:
        raise LookupError("on purpose")

    def __len__(self) -> int:
        raise LookupError("on purpose")

    def __index__(self) -> int:
        raise LookupError("on purpose")

    __float__ = __eq__ = __hash__ = __iter__ = __call__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Failing()"


VALUES: list[Callable[[], Any]] = [
    lambda: None,
    lambda: 1,
    lambda: -1,
    lambda: 1 << 70,
    lambda: 0.5,
    lambda: float("nan"),
    lambda: "ff00",
    lambda: "\udc80",
    lambda: b"a b c",
    list,
    lambda: [1.0, [Identity()], Identity()],
    lambda: (Identity(), None),
    lambda: {"a": 1},
    lambda: {1: 2},
    lambda: {Identity()},
    Identity,
    lambda: SubList([Identity()]),
    StaticHeir,
    builtin_kinds.Static,
    builtin_kinds.Twin,
    builtin_kinds.Heap,
    HeapHeir,
    Plain,
    lambda: array.array("d", [3.0, 1.0]),
    lambda: ArrayHeir("d", [2.0]),
    io.BytesIO,
    OSError,
    lambda: ValueError("given"),
    lambda: StaticHeir,
    lambda: dict,
    lambda: slice(0, 2),
    lambda: builtin_kinds.deeper,
    Failing,
]


def arguments(
    choices: Choices, targets: list[Target]
) -> Callable[[Target], tuple[list[Any], dict[str, Any]]]:
    """A recipe for positional arguments and keywords."""
    sample = choices.below(3)
    makers = [_value(choices, targets) for _ in range(choices.below(4))]
    dropped = choices.below(3) if sample == 1 else 0
    repeated = choices.one_of([0] * 13 + [9, 300, 5000])
    names = ["only", "b", "x", "tz", "\udc80", "y"][choices.below(6) :][: choices.below(3)]
    named = {name: _value(choices, targets) for name in names}

    def make(target: Target) -> tuple[list[Any], dict[str, Any]]:
        args = [*target.sample()] if sample else []
        if dropped:
            del args[-dropped:]
        if sample != 2:
            args += [maker() for maker in makers]
        args += [1.0] * repeated
        keywords = dict(target.keywords) if sample == 2 else {}
        return args, keywords | {name: maker() for name, maker in named.items()}

    return make


def _value(choices: Choices, targets: list[Target]) -> Callable[[], Any]:
    kind = choices.below(len(VALUES) + 4)
    if kind < len(VALUES):
        return VALUES[kind]
    target = choices.one_of(targets)
    return lambda: Inner(target)


def plain(value: Any) -> str:
    """What a value looks like, addresses apart."""
    if type(value).__name__ == "reader":
        return f"reader {outcome(lambda: list(value))}"
    return re.sub(r"0x[0-9a-f]+", "0x", f"{type(value).__name__} {value!r}")[:4000]


def outcome(call: Callable[[], Any]) -> tuple[str, str, str]:
    """How a call ends: with a value or an exception, of which type and of which words."""
    try:
        return ("gives", *plain(call()).partition(" ")[::2])
    except (RecursionError, SystemError, MemoryError) as error:
        # Where the stack ends, or who notices that a builtin lies, differs between ways of calling.
        return "raises", type(error).__name__, ""
    except BaseException as error:
        if type(error).__name__ == "Stopped":
            raise
        return "raises", type(error).__name__, plain(error)


def counts(args: list[Any], keywords: dict[str, Any]) -> list[int]:
    """Reference counts of the arguments that nobody else holds."""
    own = (*args, *keywords.values())
    return [sys.getrefcount(one) for one in own if type(one).__module__ != "builtins"]
