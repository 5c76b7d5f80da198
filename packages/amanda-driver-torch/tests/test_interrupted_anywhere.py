"""An exception at any call that Amanda makes, or that is made of its tools, leaves nothing of it behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import children
import pytest
from failing_programs import FAILING
from left_behind import Bench, Tenfold
from raising import WHOLE, RaiseAt, raised

import amanda
from amanda import interceptor

STRIDE = 1 if WHOLE else 7 if interceptor.NATIVE else 61
"""One place in so many is tried."""
NATIVE_OR_NOT = "test_nothing_stays_behind and not without and not program"

# Python drops what is raised while a generator that nobody needs any more is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True, scope="module")
def _interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("fresh", [True, False], ids=["first execution", "known ops"])
def test_nothing_stays_behind(bench: Bench, fresh: bool, error: type[BaseException]) -> None:
    used_tool = Tenfold()

    def run(number: int) -> tuple[RaiseAt, Tenfold, bool]:
        tool, at = Tenfold() if fresh else used_tool, RaiseAt(number, error)

        def program() -> None:
            with at, amanda.apply(tool):
                bench.step()

        return at, tool, raised(program, error)

    run(0)
    places = list(run(0)[0].sites.values())
    interruptions = 0
    for number in places[2 * fresh + (error is MemoryError) :: STRIDE]:
        _, tool, interrupted = run(number)
        interruptions += interrupted
        assert not bench.left_behind(tool), f"after {error.__name__} at call {number}"
    assert interruptions > len(places) / STRIDE / 10


@pytest.mark.long
@pytest.mark.skipif(not interceptor.NATIVE, reason="the tests above are of the other interceptor")
def test_nothing_stays_behind_without_native_code() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", NATIVE_OR_NOT, __file__]
    children.run(command, env={**os.environ, "AMANDA_NATIVE": "0"}, check=True)


class Failing(amanda.Tool):
    """Acts at every point, and raises at one of the calls of its analyses, guards and routines."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        self._number, self._error, self.calls = number, error, 0
        self.add_inst_for_op(self._forward, guard=lambda *_: self._called())
        self.add_inst_for_op(self._backward, backward=True)

    def _called(self) -> None:
        self.calls += 1
        if self.calls == self._number:
            raise self._error

    def _forward(self, context: amanda.OpContext) -> None:
        self._called()
        context.insert_before_op(self._routine)
        context.insert_after_op(self._routine)
        if context.get_op().__name__ == "sin":
            context.replace_op(self._replacement)

    def _backward(self, context: amanda.OpContext) -> None:
        self._called()
        context.insert_before_backward_op(self._routine)
        context.insert_after_backward_op(self._routine)

    def _routine(self, *values: Any) -> Any:
        self._called()
        return [value + 0 if hasattr(value, "is_floating_point") else value for value in values]

    def _replacement(self, value: Any) -> Any:
        self._called()
        return value.sin()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
def test_nothing_stays_behind_of_a_tool_that_raises(bench: Bench, error: type[BaseException]) -> None:
    def run(tool: Failing) -> bool:
        def program() -> None:
            with amanda.apply(tool):
                bench.step()
                bench.step()

        return raised(program, error)

    whole = Failing(0, error)
    assert not run(whole)
    for number in range(1, whole.calls + 1, 1 if WHOLE else 5 if interceptor.NATIVE else 17):
        tool = Failing(number, error)
        assert run(tool)
        assert not bench.left_behind(tool), f"after {error.__name__} in call {number}"


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("program", FAILING, ids=lambda program: program.__name__)
def test_nothing_stays_behind_of_a_program_that_fails(bench: Bench, program: Callable[[], None]) -> None:
    tool = Tenfold()
    with amanda.apply(tool):
        assert raised(program, Exception)
        assert raised(program, Exception)
    assert not bench.left_behind(tool)
