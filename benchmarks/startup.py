"""Cost of importing Amanda, opening the first scope, commands, and building the interceptor, each afresh."""

import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from _measure import QUICK, Times, interleaved, progress, seconds_of

import amanda

PROGRAMS = {
    "python -c pass": "pass",
    "import amanda": "import amanda",
    "import torch": "import torch",
    "import torch, amanda": "import torch, amanda",
}
SCRIPTS = {"an empty script": "", "a script that imports torch": "import torch"}
RUN = ("-m", "amanda", "run", "-q")
UNDER: dict[str, tuple[str, ...]] = {
    "python": (), "python again": (),
    "amanda run -t standard_mapping": (*RUN, "-t", "standard_mapping", "--"),
    "amanda run -t flops": (*RUN, "-t", "flops", "--"), "amanda run -t prune": (*RUN, "-t", "prune", "--"),
}  # fmt: skip
"""Ways to run a script; `standard_mapping` alone names ops, and has no result."""
COMMANDS = ("--version", "--help", "tools", "view --help", "merge --help")
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
    """Return seconds: of processes, of moments within one that has imported torch, of runs, of builds.

    Modules are compiled before, as they are from the second run on.
    """
    rounds = 1 if QUICK else 4
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = f"{scratch}/compiled"
        for name in SCRIPTS:
            Path(scratch, name).write_text(SCRIPTS[name])
        progress("  fresh processes")
        under = dict.fromkeys(PROGRAMS, nullcontext)
        processes = interleaved(
            under, lambda name: seconds_of(lambda: python("-c", PROGRAMS[name]), time.perf_counter), 0, rounds
        )
        moments = zip(*(json.loads(python("-c", WITHIN)) for _ in range(rounds + 1)), strict=True)
        progress("  amanda run, and other commands")
        commands = interleaved(
            dict.fromkeys(COMMANDS, nullcontext), lambda one: spent("-m", "amanda", *one.split()), 0, rounds
        )
        scripts = {name: f"{scratch}/{name}" for name in SCRIPTS}
        runs = {name: run(path, rounds) for name, path in scripts.items()}
        progress("  builds of the interceptor")
        builds = [build()]
    later = {name: times[1:] for name, times in zip(MOMENTS, moments, strict=True)}
    return {
        "processes": processes, "moments": later, "builds": builds, "runs": runs, "commands": commands,
    }  # fmt: skip


def run(script: str, rounds: int) -> Times:
    """Return the processor seconds of a script run in each way."""
    return interleaved(dict.fromkeys(UNDER, nullcontext), lambda way: spent(*UNDER[way], script), 0, rounds)


def spent(*arguments: str) -> float:
    """Return the processor seconds of Python with arguments, and of what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def python(*arguments: str) -> str:
    """Return what Python prints in a fresh process."""
    done = subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def build() -> float:
    """Return the seconds of compiling the native interceptor as an install does without a cached build."""
    source = Path(amanda.interceptor.__file__).with_name("_build.py")
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        builder = runpy.run_path(str(source))["ffibuilder"]
        return seconds_of(lambda: builder.compile(tmpdir=scratch), time.perf_counter)
