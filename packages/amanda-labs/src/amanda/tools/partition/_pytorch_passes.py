"""Backward passes of PyTorch that reach protected ops: gradients accumulate when one ends."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda.tools.partition._pytorch import Protection


class Passes:
    """The backward passes that are under way, by autograd's numbers.

    failed: those that ended with an error since it was emptied; their gradients are for nobody.
    """

    def __init__(self) -> None:
        self.failed: list[int] = []
        self.paths: dict[int, Sequence[str]] = {}
        self.accumulating = Lock()

    def enter(self, number: int, protection: Protection) -> None:
        """Note that a pass, which runs on this thread now, has reached a protected op."""
        import torch

        if number not in self.paths:
            self.paths[number] = ()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(_Pass(number, protection).end)

    def note(self, number: int, paths: Sequence[str]) -> None:
        """Note the parameters that have gradients in a pass so far."""
        self.paths[number] = paths


class _Pass:
    """One backward pass.  Autograd calls `end` if it succeeds, and drops this object in any case."""

    def __init__(self, number: int, protection: Protection) -> None:
        self._number, self._protection = number, protection

    def end(self) -> None:
        """Add the pass's gradients to those of the parameters."""
        passes, protection = self._protection.passes, self._protection
        stand_ins = {one.path: one for one in protection.stand_ins}
        with passes.accumulating:
            fresh = {path: stand_ins[path].is_fresh for path in passes.paths.pop(self._number)}
            protection.link.call({"kind": "accumulate", "backward_pass": self._number, "fresh": fresh})
            for path in fresh:
                stand_ins[path].give_gradient()

    def __del__(self) -> None:
        passes = self._protection.passes
        if passes.paths.pop(self._number, None) is not None:
            passes.failed.append(self._number)
