"""What importing Amanda, opening the first scope and building the interceptor take, each afresh."""

import json
import random
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import progress, script, wall_seconds

import amanda

PROGRAMS = {
    "python -c pass": "pass",
    "import amanda": "import amanda",
    "import torch": "import torch",
    "import torch, amanda": "import torch, amanda",
}
WITHIN = """
import json, time, torch
class Clock:
    def __enter__(self): self.start = time.perf_counter()
    def __exit__(self, *_): found.append(time.perf_counter() - self.start)
found, x = [], torch.ones(2)
with Clock():
    import amanda
class Empty(amanda.Tool):
    def __init__(self): self.add_inst_for_op(lambda context: None)
tool = Empty()
with Clock():
    scope = amanda.apply(tool).start()
with Clock():
    torch.add(x, x)
with Clock():
    scope.stop()
with Clock():
    with amanda.apply(tool): pass
print(json.dumps(found))
"""
MOMENTS = ("import amanda", "first scope opens", "first op", "first scope closes", "second scope")


def benchmark(quick: bool) -> dict[str, Any]:
    """Seconds: of processes, of moments within one that has imported torch, of builds."""
    rounds = 1 if quick else 9
    processes: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    moments: dict[str, list[float]] = {name: [] for name in MOMENTS}
    order, chance = list(PROGRAMS), random.Random(0)
    progress("  fresh processes")
    for turn in range(-1, rounds):  # the first fills the caches of the disk
        chance.shuffle(order)
        for name in order:
            seconds = wall_seconds(lambda name=name: python(PROGRAMS[name]))
            if turn >= 0:
                processes[name].append(seconds)
        found = json.loads(python(WITHIN))
        for name, seconds in zip(MOMENTS, found, strict=True):
            if turn >= 0:
                moments[name].append(seconds)
    progress("  builds of the interceptor")
    builds = [build() for _ in range(1 if quick else 3)]
    return {"processes": processes, "moments": moments, "builds": builds}


def python(program: str) -> str:
    """What a program prints in a fresh process."""
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def build() -> float:
    """Seconds of compiling the native interceptor as an install does where nothing is cached."""
    source = Path(amanda.interceptor.__file__).with_name("_build.py")
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        builder = runpy.run_path(str(source))["ffibuilder"]
        start = time.perf_counter()
        builder.compile(tmpdir=scratch)
        return time.perf_counter() - start


if __name__ == "__main__":
    script(benchmark, __doc__)
