"""Values of nested lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and for each list or tuple among them its leaves.

    >>> list(leaves([1, [2, (3,)], "four"]))
    [1, 2, 3, 'four']
    """
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from leaves(value)
        else:
            yield value
