"""A Ctrl-C at any call that Amanda makes leaves nothing of it behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import amanda

HOME = str(Path(amanda.__file__).parent)
BEFORE_ITS_FIRST_LINE = (amanda.Scope.__exit__.__code__,)
"""An interrupt as it is called leaves it undone, as of every context manager that is written in Python."""
STRIDE = 7 if amanda.interceptor.NATIVE else 101
"""One call in so many is interrupted."""


class Tenfold(amanda.Tool):
    """Multiplies every gradient by ten, and looks at every value."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_after_op(self.look))
        self.add_inst_for_op(lambda context: context.insert_before_backward_op(self.tenfold), backward=True)

    def look(self, *values: Any) -> None:
        """Be called with the values."""

    def tenfold(self, *grads: Any) -> Any:
        """Return the gradients times ten."""
        return [grad * 10 for grad in grads]


class InterruptAt:
    """Sends a real SIGINT at one call among those of Amanda's own code; calls: how many there were."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def __enter__(self) -> InterruptAt:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and HOME in frame.f_code.co_filename and frame.f_code not in BEFORE_ITS_FIRST_LINE:
            self.calls += 1
            if self.calls == self.number:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _interrupts() -> Any:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def gradient(leaf: Tensor, tool: amanda.Tool, number: int) -> tuple[int, bool]:
    """Train a step in a scope, interrupted at a call; return how many there were, and whether one was."""
    at, interrupted = InterruptAt(number), False
    try:
        with at, amanda.apply(tool):
            (leaf * 3).sum().backward()
    except KeyboardInterrupt:
        interrupted = True
    return at.calls, interrupted


# Python drops what is raised while a generator that nobody needs any more is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fresh", [True, False], ids=["first execution", "known ops"])
def test_no_hook_and_no_patch_stays_behind(fresh: bool) -> None:
    leaf = torch.ones(2, requires_grad=True)
    earlier = (leaf * 1).sum()  # keeps the node alive that stores the leaf's gradient
    tool = Tenfold()
    total, _ = gradient(leaf, Tenfold() if fresh else tool, 0)
    if not fresh:
        total, _ = gradient(leaf, tool, 0)
    seen = 0
    for number in range(1, total + 1, STRIDE):
        seen += gradient(leaf, Tenfold() if fresh else tool, number)[1]
        leaf.grad = None
        (leaf * 3).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [3.0, 3.0], f"after an interrupt at call {number}"
        assert not amanda.interceptor.active()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert seen > 20
    del earlier
