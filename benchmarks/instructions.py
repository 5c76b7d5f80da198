"""Instructions per op, counted by callgrind: the exact meaning of "no cost outside a scope"."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _measure import progress

HERE = Path(__file__).parent
REQUESTS = """
#include <valgrind/callgrind.h>
static void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
static void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""
NAMED = re.compile(r"(c?fn|c?ob)=\((\d+)\)(?: (.*))?$")
ALLOCATOR = re.compile(
    r"malloc|calloc|realloc|memalign|aligned_alloc|_int_free|unlink_chunk|sysmalloc|systrim|^c?free\b"
    r"|PyObject_(?:Free|Malloc|Calloc|Realloc)|address_in_range|arena"
)
"""Functions that take longer or shorter with a heap of another history."""
OWNERS = {
    "the interceptor": ("_native.",),
    "the interpreter": ("libpython", "python"),
    "torch": ("libtorch", "libc10"),
}
"""Beginnings of the names of libraries, by owner; the interpreter's code may be in its program."""


def benchmark() -> dict[str, Any]:
    """Return instructions of calls, program -> state -> counts, and of a step; or why there are none."""
    if shutil.which("valgrind") is None:
        return {"missing": "valgrind is not installed"}
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        folder = Path(scratch)
        try:
            compile_requests(folder)
        except Exception as failure:
            return {"missing": f"valgrind's headers cannot be compiled against ({type(failure).__name__})"}
        progress("  python under callgrind")
        run_counted(folder)
        version = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True).stdout
        programs = per_call(folder)
        step = programs.pop("step")
        return {"programs": programs, "step": step, "owners": list(OWNERS), "tool": version.strip()}


def compile_requests(folder: Path) -> None:
    """Make the module by which the counted program tells callgrind when to count."""
    from cffi import FFI

    builder = FFI()
    builder.cdef("void begin(void); void end(const char *name);")
    builder.set_source("_callgrind", REQUESTS)
    builder.compile(tmpdir=str(folder))


def run_counted(folder: Path) -> None:
    """Run the program of _counted.py under callgrind, which leaves its counts in the folder."""
    command = [
        "valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out", "-q",
        sys.executable, str(HERE / "_counted.py"),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def per_call(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return instructions of one call, and those of each of the OWNERS: program -> state -> counts."""
    counts: dict[tuple[str, str], dict[int, list[int]]] = {}
    for file in folder.glob("out.*"):
        text = file.read_text(errors="replace")
        named = re.search(r"^desc: Trigger: Client Request: (.+)\|(.+)\|(\d+)$", text, re.MULTILINE)
        if named:
            counts.setdefault((named[2], named[1]), {})[int(named[3])] = without_allocator(text)
    found: dict[str, dict[str, list[float]]] = {}
    for (program, state), by_calls in sorted(counts.items()):
        (few, fewer), (many, more) = sorted(by_calls.items())
        each = [(one - other) / (many - few) for one, other in zip(more, fewer, strict=True)]
        found.setdefault(program, {})[state] = each
    return found


def without_allocator(text: str) -> list[int]:
    """Return instructions in a file of callgrind's, less those of allocators; and those of OWNERS."""
    total, counted, owner, inclusive = 0, True, "", False
    owned = dict.fromkeys(OWNERS, 0)
    names: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        if named := NAMED.match(line):
            kind = named[1].removeprefix("c")
            name = names.setdefault((kind, named[2]), named[3] or "")
            if named[1] == "ob":
                library = name.rpartition("/")[2]
                owner = next((one for one, begin in OWNERS.items() if library.startswith(begin)), "")
            elif named[1] == "fn":
                counted = not ALLOCATOR.search(name)
        elif line.startswith("calls="):
            inclusive = True  # the next line counts what is called, which has lines of its own
        elif line[:1].isdigit() or line[:1] in ("+", "-", "*"):
            if counted and not inclusive:
                instructions = int(line.split()[1])
                total += instructions
                if owner:
                    owned[owner] += instructions
            inclusive = False
    return [total, *owned.values()]
