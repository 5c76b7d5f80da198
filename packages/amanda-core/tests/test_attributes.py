"""Attributes of a framework that are set for a while."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from amanda.backend import Patches


class Base:
    """A class with calls."""

    def __call__(self) -> None:
        """Return None."""


class Derived(Base):
    """A class with the calls of its base."""


@pytest.mark.parametrize("kind", [object, Derived])
def test_a_class_without_a_call_of_its_own_is_not_enclosed(kind: type) -> None:
    with pytest.raises(
        TypeError, match=f"{kind.__name__} cannot be enclosed: it has no __call__ of its own in Python"
    ):
        Patches().track_module_calls(kind)


@pytest.mark.parametrize("has_cells", [False, True])
def test_a_rerouted_function_calls_a_stand_in_wherever_it_is_held(has_cells: bool) -> None:
    factor, other = 3, 4

    def plain(x: int, *, extra: int = 0) -> int:
        return 3 * x + extra

    def enclosing(x: int, *, extra: int = 0) -> int:
        return factor * x + extra + 0 * other

    function: Any = enclosing if has_cells else plain
    held, code = {"key": function}, function.__code__
    frames: list[Any] = []

    def stand_in_of(original: Any) -> Any:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            # A debugger reads the variables of the frame that called this, among them its cells.
            frames.append(dict(sys._getframe(1).f_locals))
            return -original(*args, **kwargs)

        return stand_in

    attributes = Patches()
    attributes.reroute(function, stand_in_of)
    try:
        assert held["key"](2, extra=1) == -7
        assert frames[0]["call_args"] == (2,)
    finally:
        attributes.restore()
    assert held["key"](2, extra=1) == 7
    assert function.__code__ is code
