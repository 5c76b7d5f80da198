"""What differs between an op's sample calls without a scope and with tools that change nothing."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

import amanda

from ._coverage import unseen
from ._execution import Pass, Program, record
from ._records import Facts, computed, difference
from ._tools import FRESH, ROUTINES, Everywhere, Watch
from ._variants import Samples, Variant, dtypes, filled, variants

SEEN = 8
"""Samples of each variant and type that are called to find out what a tool sees of them."""

CONTROLS = 5
"""Repetitions without a scope, where a difference was found, to tell whether torch agrees with itself."""


class Count:
    """What was compared."""

    def __init__(self) -> None:
        self.operators, self.variants, self.calls, self.gradients, self.errors = 1, 0, 0, 0, 0

    def add(self, records: Iterable[Facts | None]) -> None:
        """Count the records of calls."""
        for one in records:
            if one is not None:
                self.calls += 1
                self.gradients += "gradients" in one
                self.errors += "error" in one


def differences(op: Any, most: int, count: Count) -> Iterator[str]:
    """How the calls of an op differ from what they are without a scope, for each variant, type and tool.

    most: how many samples of each type are called as a function; a quarter of that in other ways.
    """
    each: list[torch.dtype | None] = [*dtypes(op), None]
    many, few = ({one: Samples(op, one, enough) for one in each} for enough in (most, max(most // 4, 1)))
    for variant in variants(op):
        count.variants += 1
        for dtype in each:
            chosen = many if variant.name == "function" else few
            yield from _compared(Calls(op, variant, chosen[dtype]), count)


def not_seen(op: Any) -> Iterator[str]:
    """What the calls of an op compute that a tool does not see."""
    watch = Watch()
    for each in [Samples(op, dtype, SEEN) for dtype in dtypes(op)]:
        for variant in variants(op):
            few = list(each)
            with amanda.apply(watch):
                found = [unseen(watch, variant, one) for one in few]
            yield from (f"{variant.name}, {each.dtype}: {one}" for one in found if one)


class Calls:
    """A list of calls that can be made again and again, each time with equal arguments."""

    def __init__(self, op: Any, variant: Variant, samples: Samples) -> None:
        self.op, self.variant, self.samples = op, variant, samples
        self._program = Program()

    def __str__(self) -> str:
        return f"{self.variant.name}, {self.samples.dtype or 'errors'}"

    def records(self, backward: Pass, most: int | None = None) -> list[Facts | None]:
        """What each call leaves, or each of the first few.

        An op that refuses a call may have resized what it was to write; one named empty fills nothing.
        """
        with amanda.disabled():
            fresh = list(self.samples)[:most]
        undetermined = self.samples.dtype is None or "empty" in self.op.name
        with filled() if undetermined else nullcontext():
            return [record(self._program, self.variant, one, backward) for one in fresh]


def _compared(calls: Calls, count: Count) -> Iterator[str]:
    passes: list[tuple[Pass, int | None]] = [("accumulated", None), ("returned", None)]
    if calls.samples.dtype and calls.variant.name == "function" and calls.op.supports_gradgrad:
        passes.append(("twice", 2))
    bare = {one: calls.records(*one) for one in passes}
    for records in bare.values():
        count.add(records)
    for name, routine in ROUTINES.items():
        with amanda.apply(Everywhere(routine)):
            found = {one: calls.records(*one) for one in passes}
        for one in passes:
            yield from _told(calls, name, one, (found[one], bare[one]))
    with amanda.apply(Everywhere(ROUTINES["unchanged"])), amanda.cache_disabled():
        records = calls.records("accumulated", 2)
    yield from _told(calls, "without a cache", passes[0], (records, bare[passes[0]]))
    if calls.samples.dtype is not None:
        yield from _fresh(calls, [*passes, ("written", None)])


def _fresh(calls: Calls, passes: list[tuple[Pass, int | None]]) -> Iterator[str]:
    """How calls differ in what they compute, where routines give equal new tensors."""
    bare = {one: [_written(computed(each)) for each in calls.records(*one)] for one in passes}
    for name, routine in FRESH.items():
        for cached in (True, False):
            some = passes if cached else passes[:1]
            with amanda.apply(Everywhere(routine)), nullcontext() if cached else amanda.cache_disabled():
                found = {one: [computed(each) for each in calls.records(*one)] for one in some}
            for one in some:
                comparable = [
                    None if each is None else result
                    for result, each in zip(found[one], bare[one], strict=True)
                ]
                yield from _told(calls, name if cached else f"{name}, no cache", one, (comparable, bare[one]))


def _written(facts: Facts | None) -> Facts | None:
    """Facts of a call whose results could be written; None where torch forbids that, as after `expand`."""
    return None if facts is None or any(facts.get("writes", ())) else facts


def _told(
    calls: Calls,
    tool: str,
    made: tuple[Pass, int | None],
    records: tuple[list[Facts | None], list[Facts | None]],
) -> Iterator[str]:
    found, bare = records
    for i, one in enumerate(found):
        differs = difference(one, bare[i])
        if differs:
            own = any(
                difference(computed(calls.records(*made)[i]), computed(bare[i])) for _ in range(CONTROLS)
            )
            yield f"{calls}, sample {i}, {tool}{', and without a scope' if own else ''}: {differs}"
            return
