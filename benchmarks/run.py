"""Measure everything and write docs/benchmarks.md.

    python benchmarks/run.py [NAME ...] [--quick] [--update] [--out FOLDER]

Without names and flags: every benchmark, in about half an hour, into docs/. Raw results go to
FOLDER/benchmarks.json, and page.py makes the page from those. A part of the benchmarks, or a quick run,
goes to build/bench unless told otherwise; with --update the named ones take the place of those in docs/.
"""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _measure import progress
from _running import measured
from page import PAGE

HERE = Path(__file__).parent
NAMES = (
    "peers", "instructions", "ops", "steps", "backward", "transforms", "analysis", "cache", "shapes",
    "graphs", "compiled", "sessions", "startup", "memory", "profiling", "remat", "sentinel", "distributed",
)  # fmt: skip


def main() -> None:
    """Run each benchmark in a process of its own, then make the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="everything once: does it run?")
    parser.add_argument("--update", action="store_true", help="keep the other benchmarks of the page")
    parser.add_argument("--out", type=Path, help="folder of the page and its results")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.update and options.quick:
        parser.error("figures of a quick run do not belong on the page: --update or --quick")
    to_page = options.update or not (options.names or options.quick)
    folder = options.out or HERE.parent / ("docs" if to_page else "build/bench")
    folder.mkdir(parents=True, exist_ok=True)
    found = PAGE.read(folder / "benchmarks.json")["benchmarks"] if options.update else {}
    names = options.names or NAMES
    # Times of a quick run say nothing: its benchmarks may disturb each other.
    with ThreadPoolExecutor(os.cpu_count() if options.quick else 1) as pool:
        results_of = pool.map(lambda name: measured(HERE / f"{name}.py", options.quick), names)
        found |= zip(names, results_of, strict=True)
    ordered = {name: found[name] for name in NAMES if name in found}
    results = {"schema": PAGE.schema, "quick": options.quick, "benchmarks": ordered}
    progress(f"{folder}/benchmarks.json, {PAGE.write(results, folder)}")


if __name__ == "__main__":
    main()
