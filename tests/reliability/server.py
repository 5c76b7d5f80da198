"""A server whose threads answer requests, while another thread opens and closes scopes."""

from __future__ import annotations

import itertools
import threading
from statistics import median
from time import monotonic, perf_counter, sleep

from frameworks import Framework, Outcome, Step, X, differs

from amanda.tools.flops import FlopsTool
from amanda.tools.profile import ProfileTool

THREADS = 8
PAUSE = 0.05
"""Seconds between two requests of a thread, so that the latency is not that of a queue."""
PHASES = ("before", "during", "after")


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Serve a while without scopes, then while scopes open and close, then without again."""
    phase, wrong, scopes = PHASES[0], [0] * THREADS, 0
    latency: dict[str, list[float]] = {name: [] for name in PHASES}
    errors: list[str] = []

    def serve(thread: int) -> None:
        try:
            for request in itertools.count(thread):
                if phase == "":
                    return
                x, here, start = X[request % len(X)], phase, perf_counter()
                values = step(x)
                latency.get(here, []).append(perf_counter() - start)
                wrong[thread] += differs(values, x)
                sleep(PAUSE)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=serve, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        sleep(seconds / 4)
        phase, end = PHASES[1], monotonic() + seconds / 2
        while monotonic() < end:
            tool = (ProfileTool, FlopsTool)[scopes % 2]()
            with framework.scope(tool):
                values = step(X[0])
            wrong[0] += differs(values, X[0]) + (not tool.result.rows())
            scopes += 1
        phase = PHASES[2]
        sleep(seconds / 4)
    finally:
        phase = ""
        for thread in threads:
            thread.join()
    times = ", ".join(f"{1e6 * median(latency[name]):.0f} us" if latency[name] else "none" for name in PHASES)
    note = f"{scopes:,} scopes of profile and flops; median latency before, during, after: {times}"
    requests = sum(map(len, latency.values()))
    return Outcome(requests, "requests", sum(wrong) + len(errors), note="; ".join([note, *errors[:1]]))
