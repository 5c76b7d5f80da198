"""Attributes of a framework that are set for a while."""

from __future__ import annotations

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
