"""Tools that change nothing."""

from typing import Any

import amanda


class Silent(amanda.Tool):
    """Routines at every point of every op, which look at the values and give none back."""

    def __init__(self) -> None:
        self.analyses = self.backward_analyses = self.calls = 0
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def _forward(self, context: amanda.OpContext) -> None:
        self.analyses += 1
        context.insert_before_op(self._routine)
        context.insert_after_op(self._routine)

    def _backward(self, context: amanda.OpContext) -> None:
        self.backward_analyses += 1
        context.insert_before_backward_op(self._routine)
        context.insert_after_backward_op(self._routine)

    def _routine(self, *values: Any) -> Any:
        self.calls += 1
        return None


class Unchanged(Silent):
    """Routines that give back the values they are given."""

    def _routine(self, *values: Any) -> Any:
        self.calls += 1
        return values
