"""Memory that Amanda holds during a training step, and over thousands of them."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from _measure import progress, script

SHARE_OF = ("ResNet-50", "BERT-base")
TOOLS = {
    "empty tool, backward too": "Empty",
    "before + after": "Routines",
    "routines at all four points": "AllPoints",
}


def benchmark(quick: bool) -> dict[str, Any]:
    """Bytes; of a step: model -> tool -> moment, of training: tool -> (iteration, in use, resident)."""
    if platform.libc_ver()[0] != "glibc":
        return {"missing": "what is in use is read from glibc"}
    shares: dict[str, dict[str, Any]] = {}
    for model in SHARE_OF[: 1 if quick else None]:
        progress(f"  {model}")
        tools = list(TOOLS.items())[-1 if quick else 0 :]
        shares[model] = {title: held("share", model, tool, quick) for title, tool in tools}
    growth = {}
    iterations = 100 if quick else 10_000
    for title, tool in {"bare": "bare", "routines at all four points": "AllPoints"}.items():
        progress(f"  {iterations} iterations, {title}")
        growth[title] = held("growth", str(iterations), tool, quick)
    return {"shares": shares, "growth": growth}


def held(what: str, first: str, tool: str, quick: bool) -> Any:
    """What _held.py finds, in a process in which malloc is all that allocates."""
    environment = {
        **os.environ,
        "PYTHONMALLOC": "malloc",
        "MALLOC_ARENA_MAX": "1",
        "PYTHONHASHSEED": "0",
        "AMANDA_BENCH_QUICK": "1" if quick else "",
    }
    command = [sys.executable, str(Path(__file__).with_name("_held.py")), what, first, tool]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    script(benchmark, __doc__)
