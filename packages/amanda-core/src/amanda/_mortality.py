"""What is known of an op is forgotten when its tool, its model or its parameter is gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda._source import codes

if TYPE_CHECKING:
    from amanda._layer import Layer
    from amanda.tool import Tool


class Mortality:
    """Which op ids die with which module instance or parameter."""

    def __init__(self) -> None:
        self.layers: weakref.WeakSet[Layer] = weakref.WeakSet()
        self.ops: dict[int, set[int]] = {}
        self.subjects: dict[int, set[int]] = {}  # the same by op id, so that the living let go of the dead's

    def bind(self, op_id: int, subjects: Iterable[Any]) -> None:
        """Let plans under an op id die with any of the subjects."""
        for subject in subjects:
            ordinal = interceptor.ordinal(subject)
            self.ops.setdefault(ordinal, set()).add(op_id)
            self.subjects.setdefault(op_id, set()).add(ordinal)

    def forget_all(self, tool: Tool) -> None:
        """Forget every plan that a tool has a part in."""
        for layer in list(self.layers):
            if any(one is tool for one in layer.applied):
                layer.plans.clear()
                layer.rewrites.clear()
                layer.table.clear()

    def forget_ops(self, tool: Tool, op_ids: Iterable[int]) -> None:
        """Forget the plans of some ops that a tool has a part in, and the graphs made for its layers."""
        gone = tuple(op_ids)
        for layer in list(self.layers):
            if any(one is tool for one in layer.applied):
                layer.rewrites.clear()
                for op_id in gone:
                    layer.forget(op_id)

    def on_death(self, ordinal: int) -> None:
        """Forget the plans that belonged to an object that died."""
        for op_id in self.ops.pop(ordinal, ()):
            for other in self.subjects.pop(op_id, ()):
                if other in self.ops:
                    self.ops[other].discard(op_id)
            for layer in list(self.layers):
                layer.forget(op_id)
                for tool in layer.applied:
                    tool._amanda.on_death(op_id)


mortality = Mortality()
bind_to_subjects = mortality.bind
"""`bind_to_subjects(op_id, subjects)`: let what is known of an op die with any of the subjects."""
forget_all = mortality.forget_all
forget_ops = mortality.forget_ops
interceptor.configure(codes.describe, mortality.on_death)
