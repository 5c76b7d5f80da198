"""Memory of this process, by glibc's account and the kernel's."""

import ctypes
import gc
from pathlib import Path

MALLOC = {
    "PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1", "PYTHONHASHSEED": "0", "TF_ENABLE_ONEDNN_OPTS": "0",
}  # fmt: skip
"""Environment of a process in which malloc is all that allocates.

TensorFlow takes memory in regions of its own, each larger than the last, where it may use oneDNN.
"""


class Allocated(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def in_use() -> int:
    """Return the bytes that are allocated at this moment, by Python, C and torch alike."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Allocated
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def resident(key: str = "VmRSS") -> int:
    """Return the resident bytes of this process, or with VmHWM the most since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{key}:")[1].split()[0]) * 1024


def forget_peak() -> None:
    """Let VmHWM start from the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
