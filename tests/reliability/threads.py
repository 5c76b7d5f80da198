"""Threads that run the network in scopes and outside, with tools of their own and one that all share."""

from __future__ import annotations

import itertools
import threading
from time import monotonic

from frameworks import Double, Framework, Outcome, Step, X, differs

THREADS = 16


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Compare the outputs and gradients of every step, in a scope and outside, in each thread."""
    end, shared = monotonic() + seconds, Double()
    steps, wrong = [0] * THREADS, [0] * THREADS
    errors: list[str] = []

    def work(thread: int) -> None:
        tools = itertools.cycle([Double(), shared])
        try:
            while monotonic() < end:
                x = X[(thread + steps[thread]) % len(X)]
                with framework.scope(next(tools)):
                    wrong[thread] += differs(step(x), x, 2)
                wrong[thread] += differs(step(x), x)
                steps[thread] += 2
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    note = f"{THREADS} threads"
    return Outcome(sum(steps), "steps", sum(wrong) + len(errors), note="; ".join([note, *errors[:1]]))
