"""Tests of a suite that do not hold for a driver: for want of a capability, or because of a gap."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., Any])

CAPABILITIES: Mapping[str, str] = {
    "backward": "the framework computes gradients",
    "call_sites": "an op is a call in the program, which loops and lines tell apart, not a node of a graph",
    "fork": "a forked child can use the framework",
    "in_place": "ops write into tensors that they are given",
    "leaves": "a backward pass stores gradients on the tensors that need them",
    "mutable_tensors": "a routine can write into a tensor",
    "numbers": "an op gives a number of Python",
    "out": "ops take a tensor to write their result into",
    "schema": "an op is given its arguments in the order and under the names of its schema",
    "traceable_calls": "a traceable routine is called at each execution, not once to be traced",
    "values": "analysis routines see the values of an execution, not symbols",
}
"""Abilities of a framework, or of a mode of it, by the names that `needs` and `lacks` give them."""


def needs(*capabilities: str) -> Callable[[T], T]:
    """Mark a test of a suite that only drivers with these capabilities are given."""

    def mark(test: T) -> T:
        test.__dict__["needs"] = frozenset(capabilities)
        return test

    return mark


class Gaps:
    """A suite whose subclasses say what their driver lacks, and what they do not pass.

    lacks: capabilities that the driver does not have, with the reason; tests that need one are not collected.
    gaps: marks of other tests that do not pass, by name: `notimpl`, `notyet` or `never`.
    """

    lacks: ClassVar[dict[str, str]] = {}
    gaps: ClassVar[dict[str, pytest.MarkDecorator]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        unknown = cls.lacks.keys() - CAPABILITIES.keys()
        if unknown:
            capabilities = ", ".join(CAPABILITIES)
            raise TypeError(
                f"{cls.__name__}.lacks names {', '.join(sorted(unknown))}; there are {capabilities}"
            )
        for name in dir(cls):
            if getattr(getattr(cls, name), "needs", frozenset()) & cls.lacks.keys():
                setattr(cls, name, None)
        for name, mark in vars(cls).get("gaps", {}).items():
            test = getattr(cls, name, None)
            if not isinstance(test, types.FunctionType):
                raise TypeError(f"{cls.__name__}.gaps names {name}, which is no test that it has")
            setattr(cls, name, mark(_copied(test)))


def _copied(test: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    copy.__kwdefaults__ = test.__kwdefaults__
    copy.__dict__.update({**vars(test), "pytestmark": list(getattr(test, "pytestmark", []))})
    return copy
