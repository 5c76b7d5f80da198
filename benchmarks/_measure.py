"""What every benchmark shares: interleaved timing of variants of one program, and its command line."""

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

Variant = Callable[[], AbstractContextManager[Any]]
BARE, AGAIN = "bare", "bare again"


def controls() -> dict[str, Variant]:
    """The bare program, and the same once more: what differs between these two is noise."""
    return {BARE: nullcontext, AGAIN: nullcontext}


def interleaved(
    variants: Mapping[str, Variant],
    measure: Callable[[str], float],
    seconds: float,
    least: int = 7,
    most: int = 200,
) -> dict[str, list[float]]:
    """What `measure` gives in each variant: one value of each a round, until the seconds are over.

    The order changes from round to round, so that what drifts does so for all.
    """
    taken: dict[str, list[float]] = {name: [] for name in variants}
    order, chance = list(variants), random.Random(0)

    def go_round() -> None:
        chance.shuffle(order)
        for name in order:
            with variants[name]():
                taken[name].append(measure(name))
        gc.collect()

    go_round()  # the first time plans are made, caches filled, modules imported
    for values in taken.values():
        values.clear()
    end = time.perf_counter() + seconds
    with quiet():
        while len(taken[order[0]]) < least or (len(taken[order[0]]) < most and time.perf_counter() < end):
            go_round()
    return taken


@contextmanager
def quiet() -> Iterator[None]:
    """Without the garbage collector; what is there already is not looked at by `gc.collect` either."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def processor_seconds(program: Callable[[], object]) -> float:
    """Processor time of one run of a program in this thread, which other programs do not disturb."""
    start = time.thread_time()
    program()
    return time.thread_time() - start


def wall_seconds(program: Callable[[], object]) -> float:
    """What one run of a program takes."""
    start = time.perf_counter()
    program()
    return time.perf_counter() - start


def pin_to_one_core() -> None:
    """Keep this process on the last of its cores and torch on one thread."""
    import torch

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def progress(words: str) -> None:
    """Say on stderr what goes on."""
    print(words, file=sys.stderr, flush=True)


def script(benchmark: Callable[[bool], dict[str, Any]], description: str | None) -> None:
    """The command line of a benchmark: `--quick` for one short run, `--json FILE` for its raw results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds and small models: does it run?")
    parser.add_argument("--json", type=Path, help="write the raw results here instead of to stdout")
    options = parser.parse_args()
    results = benchmark(options.quick)
    text = json.dumps(rounded(results))
    if options.json:
        options.json.write_text(text)
    else:
        print(text)


def rounded(value: Any) -> Any:
    """Numbers with six digits that count."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value
