"""Whatever a tool raises, wherever, torch is what it was and the exception is the tool's own."""

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import PROGRAMS, Program, bits
from restoration import Restoration

import amanda


class Peculiar(Exception):
    """An exception that cannot be made again from its arguments."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Abrupt(BaseException):
    """An exception that `except Exception` does not catch."""


ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: Peculiar(7, reason="on purpose"), Abrupt, KeyboardInterrupt, GeneratorExit, StopIteration,
    StopAsyncIteration, lambda: SystemExit(3), TypeError, AttributeError, RuntimeError, NotImplementedError,
    IndexError, RecursionError, MemoryError, AssertionError, lambda: OSError(5, "on purpose"),
    lambda: UnicodeDecodeError("ascii", b"x", 0, 1, "on purpose"), torch.OutOfMemoryError,
)  # fmt: skip

REPLACEABLE = frozenset(["linear", "relu", "tanh", "sin", "conv2d", "embedding"])


class Trap(amanda.Tool):
    """Routines at every point of every op, a guard, and an exception at the n-th call of any of them.

    nth: 0 for never.
    """

    def __init__(self, error: BaseException, nth: int = 0, every: bool = True) -> None:
        self.error, self.nth, self.calls, self.every = error, nth, 0, every
        for backward in (False, True):
            for after in (False, True):
                self.add_inst_for_op(self.analyse, backward, after, self.guard if not backward else None)

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.nth:
            raise self.error

    def guard(self, inputs: Any) -> int:
        self.count()
        return len(inputs)

    def analyse(self, context: amanda.OpContext) -> None:
        self.count()
        if not self.every:
            return
        op = context.get_op()
        if context.is_backward():
            if not context.is_after():
                context.insert_before_backward_op(self.same)
                context.insert_after_backward_op(self.look)
        elif not context.is_after():
            context.insert_before_op(self.same)
            if op.__name__ in REPLACEABLE:
                context.replace_op(lambda *inputs: self.same(op(*inputs)))
            context.insert_after_op(self.with_run)
            context.insert_after_op(amanda.differentiable(self.__class__.look.__get__(Shared(self))))

    def same(self, *values: Any) -> Any:
        self.count()
        return values[0] if len(values) == 1 else values

    def look(self, *values: Any) -> None:
        self.count()

    def with_run(self, *values: Any, run: Any) -> None:
        run["seen"] = self.count()


class Shared:
    """What a routine is bound to that may carry marks."""

    def __init__(self, tool: Trap) -> None:
        self.count = tool.count


def run_under(program: Program, tools: list[amanda.Tool], cached: bool, steps: int = 2) -> list[Any]:
    switch = amanda.cache_enabled if cached else amanda.cache_disabled
    step = program()
    with amanda.apply(*tools), switch():
        return [bits(step()) for _ in range(steps)]


@cache
def expected(program: Program) -> list[Any]:
    step = program()
    return [bits(step()) for _ in range(2)]


@cache
def calls(program: Program, cached: bool) -> int:
    """How often the tool's routines are called in all."""
    tool = Trap(KeyError())
    assert run_under(program, [tool], cached) == expected(program)
    return tool.calls


@pytest.fixture(scope="module")
def restoration() -> Restoration:
    for program in PROGRAMS:  # what is made at the first use has been made
        run_under(program, [amanda.Tool()], True)
    gc.collect()
    return Restoration()


def check(
    restoration: Restoration, program: Program, make: Callable[[], BaseException], place: float, cached: bool
) -> None:
    trap = Trap(make(), 1 + int(place * calls(program, cached)))
    before = restoration()
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - which one is what is checked
        run_under(program, [amanda.Tool(), trap], cached)
    # Python itself has a StopIteration that leaves a generator cause a RuntimeError.
    assert trap.error in (raised.value, raised.value.__cause__ if isinstance(trap.error, STOPS) else None)
    assert len(trap.error.__notes__) == 1
    assert trap.error.__notes__[0].startswith("[amanda] tool Trap, ")
    assert restoration() == before
    assert run_under(program, [], cached) == expected(program)
    light = Trap(KeyError(), every=False)
    assert run_under(program, [light], True, steps=1) == expected(program)[:1]
    assert light.calls > 0
    assert restoration() == before


STOPS = (StopIteration, StopAsyncIteration)


OPTIONS: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": [*HealthCheck]}


@pytest.mark.slow
@settings(max_examples=100, derandomize=True, **OPTIONS)
@given(
    program=st.sampled_from(PROGRAMS),
    make=st.sampled_from(ERRORS),
    place=st.floats(0, 1, exclude_max=True),
    cached=st.booleans(),
)
def test_an_exception_of_any_routine_leaves_torch_as_it_was(
    restoration: Restoration, program: Program, make: Callable[[], BaseException], place: float, cached: bool
) -> None:
    check(restoration, program, make, place, cached)


@pytest.mark.soak
@pytest.mark.parametrize("thousand", range(10))
@settings(max_examples=1_000, **OPTIONS)
@given(
    program=st.sampled_from(PROGRAMS),
    make=st.sampled_from(ERRORS),
    place=st.floats(0, 1, exclude_max=True),
    cached=st.booleans(),
)
def test_ten_thousand_exceptions_at_other_places_each_time(
    restoration: Restoration,
    thousand: int,
    program: Program,
    make: Callable[[], BaseException],
    place: float,
    cached: bool,
) -> None:
    check(restoration, program, make, place, cached)
