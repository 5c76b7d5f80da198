"""The time of pipelined micro-batches: when each stage computes what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amanda.tools.partition._cut import Schedule


@dataclass(frozen=True)
class Slot:
    """One micro-batch on one stage, forward or backward, from when to when."""

    stage: int
    microbatch: int
    backward: bool
    begin: float
    end: float


def order(schedule: Schedule, stage: int, stages: int, microbatches: int) -> list[tuple[int, bool]]:
    """Return the micro-batches of a stage in order, each with whether it is its backward pass.

    Source: Huang et al. 2019 (GPipe); Narayanan et al. 2019 (PipeDream), sec. 3.2 (1F1B).
    """
    ahead = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
    warm = [(i, False) for i in range(ahead)]
    steady = [one for i in range(microbatches - ahead) for one in ((i, True), (i + ahead, False))]
    return [*warm, *steady, *((i, True) for i in range(microbatches - ahead, microbatches))]


def slots(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], microbatches: int
) -> list[Slot]:
    """Return when each stage computes each micro-batch.

    forward, backward: of each stage for a whole batch.  Micro-batches take equal parts of it, and what
    crosses takes no time.
    """
    count, done, made = len(forward), dict[tuple[int, int, bool], float](), list[Slot]()
    has_backward = any(backward)
    todo = [
        [one for one in order(schedule, stage, count, microbatches) if has_backward or not one[1]][::-1]
        for stage in range(count)
    ]
    clocks = [0.0] * count
    while any(todo):
        for stage, tasks in enumerate(todo):
            while tasks:
                microbatch, is_backward = tasks[-1]
                before = stage + 1 if is_backward else stage - 1
                ready = done.get((before, microbatch, is_backward)) if 0 <= before < count else 0.0
                if ready is None:
                    break
                begin = max(clocks[stage], ready)
                took = (backward if is_backward else forward)[stage] / microbatches
                clocks[stage] = done[stage, microbatch, is_backward] = begin + took
                made.append(Slot(stage, microbatch, is_backward, begin, begin + took))
                tasks.pop()
    return made


def bubble(slots: Sequence[Slot], stages: int) -> float:
    """Return the share of all stages' time in which a stage waits; (p-1)/(m+p-1) where stages are equal."""
    whole = stages * max((slot.end for slot in slots), default=0.0)
    busy = sum(slot.end - slot.begin for slot in slots)
    return 1 - busy / whole if whole else 0.0
