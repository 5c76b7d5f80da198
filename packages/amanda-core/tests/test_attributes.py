"""Attributes of a framework that are set for a while."""

from __future__ import annotations

import pytest

from amanda.backend import Attributes


class Callable:
    """A class whose calls are those of its metaclass."""


def test_a_class_without_calls_in_python_is_not_enclosed() -> None:
    with pytest.raises(TypeError, match="Callable has no method __call__ written in Python"):
        Attributes().enclose(Callable)
