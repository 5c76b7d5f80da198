"""An exception at any call that Amanda makes leaves nothing of it behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx_models import random, session_of, two_layers
from raising import InstalledPatches, failures

import amanda


@pytest.fixture(autouse=True, scope="module")
def _interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Tenfold(amanda.Tool):
    """Multiplies every value by ten."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_after_op(self.tenfold))

    def tenfold(self, *values: Any) -> Any:
        """Return the values times ten."""
        return [value * np.float32(10) for value in values]


# Python drops what is raised while a generator that nobody needs any more is closed.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_nothing_stays_behind(error: type[BaseException]) -> None:
    session, x = session_of(two_layers()), random(2, 16)

    def run() -> Any:
        return session.run(None, {"x": x})[0]

    bare, patches = run(), InstalledPatches(run)
    with amanda.apply(Tenfold()):
        tenfold = run()

    def check() -> list[str]:
        leftovers = patches.left()
        if run().tobytes() != bare.tobytes():
            leftovers.append("values")
        with amanda.apply(Tenfold()):
            if run().tobytes() != tenfold.tobytes():
                leftovers.append("values in a later scope")
        return leftovers

    assert failures(run, check, Tenfold, error, 10) == {}
    analysed_tool = Tenfold()
    assert failures(run, check, lambda: analysed_tool, error, 6) == {}
