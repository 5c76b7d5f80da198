"""Executions of ops whose output a later op of their match may be computed without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda.tools.kit import TensorMap
from amanda.tools.rewrite._dataflow import Node


class Step:
    """One execution of an op of a match.

    inputs: what it was given.  makers: the steps that made those.  compute: what computes it, on such inputs.
    is_used: whether its match was replaced.  reader: what outside of the match has read its output.
    """

    def __init__(
        self, node: Node, inputs: Sequence[Any], compute: Callable[..., Any], makers: Sequence[Step | None]
    ) -> None:
        self.node = node
        self.inputs = list(inputs)
        self.makers = makers
        self.compute = compute
        self.is_used = False
        self.reader = ""

    @property
    def is_intact(self) -> bool:
        """Whether nothing has been written into its inputs since."""
        return True

    def is_read(self) -> bool:
        """Whether anything outside of the match has read its output, or wants its gradient."""
        return bool(self.reader)


class Steps:
    """The steps by what they have made, in a framework whose ops cannot be put off: they compute."""

    def __init__(self) -> None:
        self._made: TensorMap[Step] = TensorMap()

    def take(self, node: Node, inputs: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """The output of an op: its value, or what stands for it until it is read."""
        makers, value = self.makers(inputs), compute(*inputs)
        if hasattr(value, "dtype"):
            self._made[value] = Step(node, inputs, compute, makers)
        return value

    def makers(self, inputs: Sequence[Any]) -> list[Step | None]:
        """The step of each input."""
        return [self.of(value) for value in inputs]

    def of(self, value: Any) -> Step | None:
        """The step that made a value."""
        return self._made.get(value)

    def settle(self, written: Sequence[Any] = ()) -> None:
        """Compute what was put off and reads any of these tensors, which will be written; else all."""
