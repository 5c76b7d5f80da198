"""Benchmarks in processes of their own."""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _machine import machine, versions
from _measure import progress


def measured(script: Path, quick: bool) -> dict[str, Any]:
    """Return raw results of a benchmark, with machine, versions, date, time taken and load.

    Raises CalledProcessError where it fails.
    """
    progress(f"{script.stem} ...")
    begun, before = time.perf_counter(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        file = Path(scratch, "results.json")
        command = [sys.executable, str(Path(__file__).with_name("_measure.py")), str(script), str(file)]
        environment = {**os.environ, "AMANDA_BENCH_QUICK": "1" if quick else ""}
        subprocess.run(command, env=environment, check=True)
        results = json.loads(file.read_text())
    return {
        "machine": machine(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "took": round(time.perf_counter() - begun),
        "load": [round(before, 2), round(os.getloadavg()[0], 2)],
        **results,
    }
