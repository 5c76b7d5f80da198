"""Executions of ops whose output a later op of their match may be computed without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amanda.tools.kit import TensorMap
from amanda.tools.rewrite._program import Node


@dataclass(eq=False)
class Step:
    """One execution of an op of a match.

    inputs: of the op.  makers: the steps that made those.  compute: from inputs to the output.
    is_used: True once its match was replaced.  reader: the first reader of the output outside of the match.
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
        """Return True if anything outside of the match has read the output, or wants its gradient."""
        return bool(self.reader)


class Steps:
    """The steps by their outputs, in a framework whose ops cannot be put off: they compute.

    read: called with each step whose output something outside of its match reads.
    """

    def __init__(self, read: Callable[[Step], None]) -> None:
        self._read = read
        self._made = TensorMap[Step]()

    def take(self, node: Node, inputs: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """Return the output of an op, or a tensor that stands for it until it is read."""
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
        """Compute each op that was put off and reads a tensor that will be written; each without any."""
