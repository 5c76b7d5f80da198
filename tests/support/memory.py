"""Memory of this process: what might grow in the course of many steps."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from amanda.interceptor import Mark
from amanda.plan.lifetime import plan_lifetimes

STATM = Path("/proc/self/statm")
PAGE = 4096


def counts() -> dict[str, int]:
    """Return the numbers of objects that might grow."""
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "stacks": len(plan_lifetimes.stacks),
        "subjects": len(plan_lifetimes.op_ids_by_subject),
        "ops": sum(map(len, plan_lifetimes.op_ids_by_subject.values())),
        "marks": Mark.alive(),
        "ops of tools": sum(
            len(tool._amanda.analysed_ops) for stack in plan_lifetimes.stacks for tool in stack.applied
        ),
    }


def resident() -> int:
    """Return the bytes in memory, once the allocator has given back what it can."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return int(STATM.read_text().split()[1]) * PAGE if STATM.exists() else 0
