"""Tests of a suite that a driver does not pass, marked with the reason."""

from __future__ import annotations

import types
from typing import Any, ClassVar

import pytest


class Gaps:
    """A suite whose subclasses say what they do not pass.

    gaps: marks of the tests that do not pass yet, by name: `notimpl`, `notyet` or `never`.
    """

    gaps: ClassVar[dict[str, pytest.MarkDecorator]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, mark in vars(cls).get("gaps", {}).items():
            test = getattr(cls, name, None)
            if not isinstance(test, types.FunctionType):
                raise TypeError(f"{cls.__name__}.gaps names {name}, which is no test of the suite")
            setattr(cls, name, mark(_copied(test)))


def _copied(test: types.FunctionType) -> types.FunctionType:
    copy = types.FunctionType(
        test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__
    )
    copy.__kwdefaults__ = test.__kwdefaults__
    copy.__dict__.update({**vars(test), "pytestmark": list(getattr(test, "pytestmark", []))})
    return copy
