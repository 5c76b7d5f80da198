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
        for facts in records:
            if facts is not None:
                self.calls += 1
                self.gradients += "gradients" in facts
                self.errors += "error" in facts


def differences(op: Any, most: int, count: Count) -> Iterator[str]:
    """How the calls of an op differ from what they are without a scope, for each variant, type and tool.

    most: how many samples of each type are called as a function; a quarter of that in other ways.
    """
    sampled_dtypes: list[torch.dtype | None] = [*dtypes(op), None]
    many, few = (
        {dtype: Samples(op, dtype, enough) for dtype in sampled_dtypes}
        for enough in (most, max(most // 4, 1))
    )
    for variant in variants(op):
        count.variants += 1
        for dtype in sampled_dtypes:
            samples = many if variant.name == "function" else few
            yield from _differences_of_calls(Calls(op, variant, samples[dtype]), count)


def not_seen(op: Any) -> Iterator[str]:
    """What the calls of an op compute that a tool does not see."""
    watch = Watch()
    for samples in [Samples(op, dtype, SEEN) for dtype in dtypes(op)]:
        for variant in variants(op):
            few = list(samples)
            with amanda.apply(watch):
                unseen_parts = [unseen(watch, variant, sample) for sample in few]
            yield from (f"{variant.name}, {samples.dtype}: {part}" for part in unseen_parts if part)


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
            return [record(self._program, self.variant, sample, backward) for sample in fresh]


def _differences_of_calls(calls: Calls, count: Count) -> Iterator[str]:
    passes: list[tuple[Pass, int | None]] = [("accumulated", None), ("returned", None)]
    if calls.samples.dtype and calls.variant.name == "function" and calls.op.supports_gradgrad:
        passes.append(("twice", 2))
    bare = {backward_pass: calls.records(*backward_pass) for backward_pass in passes}
    for records in bare.values():
        count.add(records)
    for name, routine in ROUTINES.items():
        with amanda.apply(Everywhere(routine)):
            observed = {backward_pass: calls.records(*backward_pass) for backward_pass in passes}
        for backward_pass in passes:
            yield from _first_difference(
                calls, name, backward_pass, (observed[backward_pass], bare[backward_pass])
            )
    with amanda.apply(Everywhere(ROUTINES["unchanged"])), amanda.cache_disabled():
        records = calls.records("accumulated", 2)
    yield from _first_difference(calls, "without a cache", passes[0], (records, bare[passes[0]]))
    if calls.samples.dtype is not None:
        yield from _differences_under_new_values(calls, [*passes, ("written", None)])


def _differences_under_new_values(calls: Calls, passes: list[tuple[Pass, int | None]]) -> Iterator[str]:
    """How calls differ in what they compute, where routines give equal new tensors."""
    bare = {
        backward_pass: [_if_writable(computed(each)) for each in calls.records(*backward_pass)]
        for backward_pass in passes
    }
    for name, routine in FRESH.items():
        for cached in (True, False):
            compared_passes = passes if cached else passes[:1]
            with amanda.apply(Everywhere(routine)), nullcontext() if cached else amanda.cache_disabled():
                observed = {
                    backward_pass: [computed(each) for each in calls.records(*backward_pass)]
                    for backward_pass in compared_passes
                }
            for backward_pass in compared_passes:
                comparable = [
                    None if each is None else result
                    for result, each in zip(observed[backward_pass], bare[backward_pass], strict=True)
                ]
                yield from _first_difference(
                    calls,
                    name if cached else f"{name}, no cache",
                    backward_pass,
                    (comparable, bare[backward_pass]),
                )


def _if_writable(facts: Facts | None) -> Facts | None:
    """Facts of a call whose results could be written; None where torch forbids that, as after `expand`."""
    return None if facts is None or any(facts.get("writes", ())) else facts


def _first_difference(
    calls: Calls,
    tool: str,
    backward_pass: tuple[Pass, int | None],
    records: tuple[list[Facts | None], list[Facts | None]],
) -> Iterator[str]:
    observed, bare = records
    for i, facts in enumerate(observed):
        differs = difference(facts, bare[i])
        if differs:
            differs_without_scope = any(
                difference(computed(calls.records(*backward_pass)[i]), computed(bare[i]))
                for _ in range(CONTROLS)
            )
            also = ", and without a scope" if differs_without_scope else ""
            yield f"{calls}, sample {i}, {tool}{also}: {differs}"
            return
