"""A program to be killed: `python victim.py FRAMEWORK FOLDER` dumps and saves until then.

`python victim.py FRAMEWORK --full-disk` runs steps, those in the middle on a full disk, prints their number,
and kills itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from disk import full_disk
from frameworks import FRAMEWORKS, X

from amanda.tools.dump import DumpTool
from amanda.tools.flops import FlopsTool

STEPS = 45


def dump(name: str, folder: Path) -> None:
    """Write a dump and a result after each step, for ever."""
    framework = FRAMEWORKS[name]
    step = framework.start()
    tools = DumpTool(folder / "dump", outputs="full", executions=None, format="npz"), FlopsTool()
    for _ in iter(int, 1):
        with framework.scope(*tools):
            step(X[0])
        tools[1].result.save(folder / "flops.json")
        sys.stdout.write("saved\n")
        sys.stdout.flush()


def fill(name: str) -> None:
    """Run steps under the tools of `amanda run`."""
    step = FRAMEWORKS[name].start()
    for number in range(STEPS):
        with full_disk(0) if STEPS <= 3 * number < 2 * STEPS else contextlib.nullcontext():
            step(X[0])
            time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[2] == "--full-disk":
        fill(sys.argv[1])
    else:
        dump(sys.argv[1], Path(sys.argv[2]))
