"""Make the page of benchmarks from raw results.

python benchmarks/page.py docs/benchmarks.json [--out FOLDER]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from _figures import figures
from _plots import draw
from _sections import SECTIONS
from _tables import table
from _words import words

SCHEMA = 1
"""Of raw results; it grows when what is in there means something else."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="benchmarks.json of a run")
    parser.add_argument("--out", type=Path, help="folder of the page; that of the results, if not given")
    options = parser.parse_args()
    print(write(json.loads(options.results.read_text()), options.out or options.results.parent))


def write(results: dict[str, Any], folder: Path) -> Path:
    """Write benchmarks.md and its plots into a folder; gives the page."""
    page = folder / "benchmarks.md"
    page.write_text(text(results))
    draw(results["benchmarks"], folder)
    return page


def text(results: dict[str, Any]) -> str:
    """The page, in Markdown.

    Raises ValueError for results of another schema.
    """
    if results.get("schema") != SCHEMA:
        raise ValueError(
            f"results have schema {results.get('schema')}, this page is made from {SCHEMA}: measure again"
        )
    found = results["benchmarks"]
    lines = [*introduction(results), *table(["", "figure", "measured", ""], figures(found))]
    for name, section in SECTIONS.items():
        if name in found:
            lines += section(found[name])
    return "\n".join([*lines, *how_to_run(results)])


def introduction(results: dict[str, Any]) -> list[str]:
    """What was measured, on what, and how to read it."""
    took, load = results["took"], results["load"]
    rows = [*results["machine"].items(), *results["versions"].items()]
    rows += [
        ("measured", f"{results['date']}, in {took // 60} min {took % 60} s"),
        ("load average", f"{load[0]} before, {load[1]} after"),
    ]
    busy = load[0] > int(results["machine"]["cores"]) / 2
    others = [
        "**Other programs kept the machine busy meanwhile: intervals are wide, clock times too long.**",
        "",
    ]
    quick = ["**A quick run, of a few rounds and small models: it shows that all runs, no more.**", ""]
    return [
        "# Benchmarks", "",
        "Made by `nox -s bench` from [its raw results](benchmarks.json); not written by hand.", "",
        *(quick if results["quick"] else []),
        *(others if busy else []),
        *table(["", ""], rows),
        *words("introduction"),
        "## Figures", "",
        "What Amanda is to reach, and whether the interval says that it does.", "",
    ]  # fmt: skip


def how_to_run(results: dict[str, Any]) -> list[str]:
    """The last section."""
    took = sum(one["took"] for one in results["benchmarks"].values())
    each = ", ".join(f"`{name}` {one['took']} s" for name, one in results["benchmarks"].items())
    return [
        "## Run it again", "",
        "```", "nox -s bench                      # everything, into docs/",
        "nox -s bench -- --quick           # everything once, into build/bench/",
        "nox -s bench -- ops steps         # some of it, into build/bench/",
        "python benchmarks/page.py docs/benchmarks.json   # the page alone, from raw results", "```", "",
        f"It took {took // 60} min {took % 60} s here: {each}.", "", *words("again"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
