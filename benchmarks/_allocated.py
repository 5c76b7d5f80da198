"""Memory of this process, by glibc's account and the kernel's.

All that is allocated is in glibc's account where PYTHONMALLOC=malloc and MALLOC_ARENA_MAX=1.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Allocated(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Allocated


def in_use() -> int:
    """Bytes that are allocated at this moment, by Python, C and torch alike."""
    gc.collect()
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def resident(key: str = "VmRSS") -> int:
    """Resident bytes of this process, or with VmHWM the most since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{key}:")[1].split()[0]) * 1024


def forget_peak() -> None:
    """Let VmHWM start from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def in_own_process(script: str, *arguments: str, quick: bool) -> Any:
    """What a script of this folder prints as JSON, in a process in which malloc is all that allocates.

    TensorFlow takes memory in regions of its own, each larger than the last, where it may use oneDNN.
    """
    environment = {
        **os.environ,
        "PYTHONMALLOC": "malloc",
        "MALLOC_ARENA_MAX": "1",
        "PYTHONHASHSEED": "0",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "AMANDA_BENCH_QUICK": "1" if quick else "",
    }
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)
