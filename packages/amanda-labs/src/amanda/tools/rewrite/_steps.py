"""Executions of the ops of matches, whose outputs a replacement may not need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amanda.backend import TensorMap
from amanda.tools.rewrite._program import Node


@dataclass(eq=False)
class Step:
    """One execution of an op of a match.

    makers: the steps that made the inputs.  compute: from inputs to the output.
    is_used: True once the match was replaced.  reader: the first reader of the output outside of the match.
    """

    node: Node
    inputs: Sequence[Any]
    compute: Callable[..., Any]
    makers: Sequence[Step | None] = ()
    is_used: bool = False
    reader: str = ""

    @property
    def is_intact(self) -> bool:
        """True if nothing has been written into the inputs of the op since it was called."""
        return True

    def is_read(self) -> bool:
        """Return True if an op outside of the match has read the output, or a hook wants its gradient."""
        return bool(self.reader)


class Steps:
    """The steps by their outputs, in a framework whose ops cannot be delayed.

    read: called with each step whose output is read outside of the match.
    """

    def __init__(self, read: Callable[[Step], None]) -> None:
        self._read = read
        self._made = TensorMap[Step]()

    def take(self, node: Node, inputs: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """Return the output of an op, or a tensor that stands for the output until it is read."""
        makers, value = self.makers(inputs), compute(*inputs)
        if hasattr(value, "dtype"):
            self._made[value] = Step(node, inputs, compute, makers)
        return value

    def makers(self, inputs: Sequence[Any]) -> list[Step | None]:
        """Return the step of each input."""
        return [self.of(value) for value in inputs]

    def of(self, value: Any) -> Step | None:
        """Return the step that made a value."""
        return self._made.get(value)

    def settle(self, written: Sequence[Any] = ()) -> None:
        """Compute each delayed op that reads a tensor of `written`; without tensors, each delayed op."""
