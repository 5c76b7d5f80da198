"""Measure everything and write docs/benchmarks.md.

    python benchmarks/run.py [NAME ...] [--quick] [--update] [--out FOLDER]

Without names and flags: every benchmark, about half an hour, into docs/. Raw results go to
FOLDER/benchmarks.json, and page.py makes the page from those. A part of the benchmarks, or a quick run,
goes to build/bench unless told otherwise; with --update the named ones take the place of those in docs/.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import page
from _machine import machine, versions
from _measure import progress

HERE = Path(__file__).parent
NAMES = (
    "ops",
    "steps",
    "backward",
    "analysis",
    "cache",
    "graphs",
    "startup",
    "memory",
    "instructions",
    "profiling",
    "tools",
    "remat",
)


def main() -> None:
    """Run each benchmark in a process of its own, then make the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="everything once, about a minute: does it run?")
    parser.add_argument("--update", action="store_true", help="keep the other benchmarks of the page")
    parser.add_argument("--out", type=Path, help="folder of the page and its results")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.update and options.quick:
        parser.error("figures of a quick run do not belong on the page: --update or --quick")
    to_page = options.update or not (options.names or options.quick)
    folder = options.out or HERE.parent / ("docs" if to_page else "build/bench")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "benchmarks.json"
    kept = page.read(file)["benchmarks"] if options.update else {}
    found = {**kept, **measured(options.names or NAMES, options.quick)}
    ordered = {name: found[name] for name in NAMES if name in found}
    results = {"schema": page.SCHEMA, "quick": options.quick, "benchmarks": ordered}
    file.write_text(one_line_a_list(results))
    progress(f"{file}, {page.write(results, folder)}")


def measured(names: Sequence[str], quick: bool) -> dict[str, Any]:
    """Raw results of the benchmarks, each with where and when it was measured, and the load around it."""
    found: dict[str, Any] = {}
    setting = {"machine": machine(), "versions": versions()}
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        for name in names:
            progress(f"{name} ...")
            file, begun, before = Path(scratch, f"{name}.json"), time.perf_counter(), os.getloadavg()[0]
            command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(file)]
            subprocess.run([*command, *(["--quick"] if quick else [])], check=True)
            found[name] = {
                **setting,
                "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
                "took": round(time.perf_counter() - begun),
                "load": [round(before, 2), round(os.getloadavg()[0], 2)],
                **json.loads(file.read_text()),
            }
    return found


def one_line_a_list(value: Any, depth: int = 0) -> str:
    """JSON with each key of an object on a line of its own, and each list on one line."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = " " * (depth + 1)
    lines = [f"{inner}{json.dumps(key)}: {one_line_a_list(one, depth + 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}" + ("\n" if depth == 0 else "")


if __name__ == "__main__":
    main()
