"""Tools that are everywhere and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from amanda.context import OpContext
from amanda.tool import Tool


class Unchanged(Tool):
    """Routines at every point of every op, which give back the values that they are given.

    analyses, backward_analyses, calls: how many there were.
    """

    def __init__(self) -> None:
        self.analyses = self.backward_analyses = self.calls = 0
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def _forward(self, context: OpContext) -> None:
        self.analyses += 1
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)

    def _backward(self, context: OpContext) -> None:
        self.backward_analyses += 1
        context.insert_before_backward_op(self.routine)
        context.insert_after_backward_op(self.routine)

    def routine(self, *values: Any) -> Any:
        """Return what is called at every point."""
        self.calls += 1
        return values


class Silent(Unchanged):
    """Routines at every point of every op, which look at the values and give none back."""

    def routine(self, *values: Any) -> Any:
        self.calls += 1


class Fresh(Unchanged):
    """Routines at every point of every op, which give equal new values.

    copied: makes a tensor equal to the one that it is given, and hands back what is no tensor.
    """

    def __init__(self, copied: Callable[[Any], Any]) -> None:
        self.copied = copied
        super().__init__()

    def routine(self, *values: Any) -> Any:
        self.calls += 1
        return [self._of(value) for value in values]

    def _of(self, value: Any) -> Any:
        if isinstance(value, list) or type(value) is tuple:
            return type(value)(self._of(element) for element in value)
        return self.copied(value)
