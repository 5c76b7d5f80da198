"""Benchmarks with the facts about their run."""

import datetime
import os
import time
from pathlib import Path
from typing import Any

from _machine import commit, machine, versions
from _measure import in_own_process, progress


def measured(script: Path, quick: bool) -> dict[str, Any]:
    """Return raw results of a benchmark, with machine, versions, commit, date, time taken and load.

    Raises CalledProcessError where it fails.
    """
    progress(f"{script.stem} ...")
    begun, before = time.perf_counter(), os.getloadavg()[0]
    results = in_own_process(script, AMANDA_BENCH_QUICK="1" if quick else "")
    return {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "took": round(time.perf_counter() - begun),
        "load": [round(before, 2), round(os.getloadavg()[0], 2)],
        **results,
    }
