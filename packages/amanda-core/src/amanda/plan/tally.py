"""Observers that count executions, which native code does without a call of Python."""

from __future__ import annotations

from typing import Any

from amanda import interceptor


class Tally(interceptor.ShapeCounter):
    """An observer that counts executions; insert the object itself, with no values.

    >>> tally = Tally()
    >>> context.insert_after_op(tally, outputs=[])  # doctest: +SKIP
    >>> tally()
    >>> tally.calls
    1
    """

    __slots__ = ()
    __amanda_marks__ = frozenset({"observer"})

    def __call__(self) -> None:
        """Count an execution, as native code does instead of this call."""
        self.add(())

    @property
    def recomputed(self) -> Tally | None:
        """Return what counts recomputations; None: they are not counted."""
        return None

    @property
    def calls(self) -> int:
        """Return how many executions were counted."""
        return sum(calls for _, calls in self.items())


class ShapeTally(interceptor.ShapeCounter):
    """An observer that counts executions by their shapes; insert the object itself, with no values.

    limit: native code counts so many different shapes by itself, and calls the object where there are more.
    >>> tally = ShapeTally()
    >>> tally(shapes=(((2, 3),), ((2, 4),)))
    >>> tally.items()
    [((((2, 3),), ((2, 4),)), 1)]
    """

    __slots__ = ()
    __amanda_marks__ = frozenset({"observer"})

    def __call__(self, *, shapes: tuple[Any, ...]) -> None:
        """Count an execution, as native code does instead of this call up to the limit."""
        self.add(shapes)

    @property
    def recomputed(self) -> ShapeTally | None:
        """Return what counts recomputations; None: they are not counted."""
        return None
