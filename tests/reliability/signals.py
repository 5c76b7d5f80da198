"""Signals whose handlers raise at random instants, in a loop of scopes."""

from __future__ import annotations

from time import monotonic, perf_counter

from frameworks import Double, Framework, Outcome, Step, X, differs
from interrupts import Interrupts, opened
from raising import InstalledPatches


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Interrupt a step as its scope opens, while it runs, and as the scope closes."""
    patches, tool, interrupts = (
        InstalledPatches(lambda: step(X[0])),
        Double(),
        Interrupts(framework.raises_within),
    )

    def program() -> None:
        with framework.scope(tool):
            step(X[0])

    program()
    start = perf_counter()
    program()
    most = 1.2 * (perf_counter() - start) + 0.001
    wrong, left, end = 0, set(), monotonic() + seconds
    with interrupts.handling():
        while monotonic() < end:
            interrupts.around(program, most)
            for scope in opened():
                scope.stop()
            left.update(patches.left())
            wrong += differs(step(X[1]), X[1])
            if interrupts.raised % 10 == 0:
                with framework.scope(tool):
                    wrong += differs(step(X[1]), X[1], 2)
    return Outcome(interrupts.raised, "signals", wrong, sorted(left))
