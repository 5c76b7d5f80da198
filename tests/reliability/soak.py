"""Many steps and many scopes: memory stays flat."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from frameworks import Double, Framework, Outcome, Step, X
from memory import counts, resident

ALLOWANCE = 3_000_000
"""Bytes that may come once, as an arena or two of the allocator's."""


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Repeat steps of one scope, then scopes of new tools of a step each."""
    with framework.scope(Double()):
        steps, more = grown(lambda: step(X[0]), seconds / 2)

    def scope() -> None:
        with framework.scope(Double()):
            step(X[0])

    scopes, more_of_scopes = grown(scope, seconds / 2)
    return Outcome(
        steps + scopes, f"steps, {scopes:,} of them in scopes of new tools", left=more + more_of_scopes
    )


def grown(repeat: Callable[[], object], seconds: float) -> tuple[int, list[str]]:
    """Repeat something; return how often, and what grew by half an object each or more.

    The first third of the time, in which caches fill, does not count.
    """
    start = monotonic()
    first = _repeat_until(repeat, start + seconds / 3)
    before, held = counts(), resident()
    times = _repeat_until(repeat, start + seconds)
    after, more = counts(), resident() - held
    left = [
        f"{after[name] - count:+,} {name} in {times:,}"
        for name, count in before.items()
        if after[name] - count > max(times / 2, 20)
    ]
    if more > ALLOWANCE and more > 100 * times:
        left.append(f"{more / 2**20:+.1f} MiB in {times:,}")
    return first + times, left


def _repeat_until(repeat: Callable[[], object], end: float) -> int:
    times = 0
    while monotonic() < end or not times:
        repeat()
        times += 1
    return times
