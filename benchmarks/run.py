"""Measure everything and write docs/benchmarks.md.

    python benchmarks/run.py [NAME ...] [--quick] [--out FOLDER]

Without names and flags: every benchmark, about half an hour, into docs/. Raw results go to
FOLDER/benchmarks.json, and page.py makes the page from those. A part of the benchmarks, or a quick run,
goes to build/bench unless told otherwise.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import page
from _machine import machine, versions
from _measure import progress

HERE = Path(__file__).parent
NAMES = ("ops", "steps", "backward", "analysis", "cache", "graphs", "startup", "memory", "instructions")


def main() -> None:
    """Run each benchmark in a process of its own, then make the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="everything once, about a minute: does it run?")
    parser.add_argument("--out", type=Path, help="folder of the page and its results")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    whole = not options.names and not options.quick
    folder = options.out or HERE.parent / ("docs" if whole else "build/bench")
    folder.mkdir(parents=True, exist_ok=True)
    results = measured(options.names or NAMES, options.quick)
    file = folder / "benchmarks.json"
    file.write_text(one_line_a_list(results))
    progress(f"{file}, {page.write(results, folder)}")


def measured(names: list[str] | tuple[str, ...], quick: bool) -> dict[str, Any]:
    """Raw results of the benchmarks, with what they were measured on."""
    before, start = os.getloadavg(), time.perf_counter()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        for name in names:
            progress(f"{name} ...")
            file, begun = Path(scratch, f"{name}.json"), time.perf_counter()
            command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file)]
            subprocess.run([*command, *(["--quick"] if quick else [])], check=True)
            found[name] = {"took": round(time.perf_counter() - begun), **json.loads(file.read_text())}
    return {
        "schema": page.SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "quick": quick,
        "took": round(time.perf_counter() - start),
        "load": [round(load[0], 2) for load in (before, os.getloadavg())],
        "machine": machine(),
        "versions": versions(),
        "benchmarks": found,
    }


def one_line_a_list(value: Any, depth: int = 0) -> str:
    """JSON with each key of an object on a line of its own, and each list on one line."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = " " * (depth + 1)
    lines = [f"{inner}{json.dumps(key)}: {one_line_a_list(one, depth + 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}" + ("\n" if depth == 0 else "")


if __name__ == "__main__":
    main()
