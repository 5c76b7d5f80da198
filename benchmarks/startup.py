"""Cost of importing Amanda, opening the first scope and building the interceptor, each afresh."""

import json
import runpy
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from _measure import QUICK, interleaved, progress, seconds_of

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


def benchmark() -> dict[str, Any]:
    """Return seconds: of processes, of moments within one that has imported torch, of builds."""
    rounds = 1 if QUICK else 9
    progress("  fresh processes")
    under = dict.fromkeys(PROGRAMS, nullcontext)
    processes = interleaved(
        under, lambda name: seconds_of(lambda: python(PROGRAMS[name]), time.perf_counter), 0, rounds
    )
    moments = zip(*(json.loads(python(WITHIN)) for _ in range(rounds)), strict=True)
    progress("  builds of the interceptor")
    builds = [build() for _ in range(1 if QUICK else 3)]
    return {
        "processes": processes, "moments": dict(zip(MOMENTS, moments, strict=True)), "builds": builds,
    }  # fmt: skip


def python(program: str) -> str:
    """Return what a program prints in a fresh process."""
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def build() -> float:
    """Return the seconds of compiling the native interceptor as an install does without a cached build."""
    source = Path(amanda.interceptor.__file__).with_name("_build.py")
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        builder = runpy.run_path(str(source))["ffibuilder"]
        return seconds_of(lambda: builder.compile(tmpdir=scratch), time.perf_counter)
