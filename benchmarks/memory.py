"""Memory that Amanda holds during a training step, and over thousands of them."""

import platform
from typing import Any

from _allocated import in_own_process
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
        shares[model] = {
            title: in_own_process("_held.py", "share", model, tool, quick=quick) for title, tool in tools
        }
    growth = {}
    iterations = 100 if quick else 10_000
    for title, tool in {"bare": "bare", "routines at all four points": "AllPoints"}.items():
        progress(f"  {iterations} iterations, {title}")
        growth[title] = in_own_process("_held.py", "growth", str(iterations), tool, quick=quick)
    return {"shares": shares, "growth": growth}


if __name__ == "__main__":
    script(benchmark, __doc__)
