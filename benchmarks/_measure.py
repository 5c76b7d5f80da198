"""Interleaved timing of variants of one program, and the process in which a benchmark runs.

python _measure.py SCRIPT FILE [ARGUMENT ...] writes the results of a script as JSON, as `in_own_process`
reads them.  They are those of its function `benchmark`; a SCRIPT overhead_eager.py stands for the function
`eager` of overhead.py.
"""

import gc
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

Variant = Callable[[], AbstractContextManager[Any]]
Times = dict[str, list[float]]
BARE, AGAIN = "bare", "bare again"
QUICK = bool(os.environ.get("AMANDA_BENCH_QUICK"))
"""True for a run of few rounds and small models, which shows that all runs."""


def controls() -> dict[str, Variant]:
    """Return the bare program, and the same once more: a difference between these two is noise."""
    return {BARE: nullcontext, AGAIN: nullcontext}


def interleaved(
    variants: Mapping[str, Variant],
    measure: Callable[[str], float],
    seconds: float,
    least: int = 7,
    most: int = 200,
) -> Times:
    """Return what `measure` gives in each variant: one value of each a round, until the seconds are over.

    The order changes from round to round, so that what drifts does so for all.  A quick run goes
    one round, without another that warms up.
    """
    taken: Times = {name: [] for name in variants}
    order, chance = list(variants), random.Random(0)
    if QUICK:
        seconds, least = 0, 1

    def go_round() -> None:
        chance.shuffle(order)
        for name in order:
            with variants[name]():
                taken[name].append(measure(name))
        gc.collect()

    if not QUICK:
        go_round()  # the first time plans are made, caches filled, modules imported
        for values in taken.values():
            values.clear()
    end = time.perf_counter() + seconds
    with quiet():
        while len(taken[order[0]]) < least or (len(taken[order[0]]) < most and time.perf_counter() < end):
            go_round()
    return taken


def steps_in_turns(
    step: Callable[[], object],
    variants: Mapping[str, Variant],
    seconds: float = 0.0,
    least: int = 5,
    most: int = 40,
    clock: Callable[[], float] = time.thread_time,
) -> Times:
    """Return the processor seconds of a step in each variant, which other programs do not disturb."""
    return interleaved(variants, lambda _: seconds_of(step, clock), seconds, least, most)


def seconds_of(program: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    """Return the seconds of one run of a program by a clock; by default processor time of this thread.

    timeit compiles its own code at each call: tools would find every call site of the program new.
    """
    start = clock()
    program()
    return clock() - start


@contextmanager
def quiet() -> Iterator[None]:
    """Switch the garbage collector off; `gc.collect` does not look at present objects either."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def pin_to_one_core() -> None:
    """Keep this process on the last of its cores, and torch, if it is imported, on one thread.

    Processes of a quick run share the cores.
    """
    if hasattr(os, "sched_setaffinity") and not QUICK:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def in_own_process(script: Path, *arguments: str, **environment: str) -> Any:
    """Return the results of a script in a process of its own.

    Raises CalledProcessError where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        file = Path(scratch, "results.json")
        command = [sys.executable, __file__, str(script), str(file), *arguments]
        subprocess.run(command, env={**os.environ, **environment}, check=True)
        return json.loads(file.read_text())


def progress(words: str) -> None:
    """Write to stderr what goes on."""
    print(words, file=sys.stderr, flush=True)


def rounded(value: Any) -> Any:
    """Return numbers with six digits that count."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    script, file = map(Path, sys.argv[1:3])
    sys.path.insert(0, str(script.parent))
    module, _, function = script.stem.partition("_")
    found = getattr(importlib.import_module(module), function or "benchmark")(*sys.argv[3:])
    file.write_text(json.dumps(rounded(found)))
