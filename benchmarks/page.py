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

SCHEMA = 2
"""Of raw results; it grows when what is in there means something else."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="benchmarks.json of a run")
    parser.add_argument("--out", type=Path, help="folder of the page; that of the results, if not given")
    options = parser.parse_args()
    print(write(read(options.results), options.out or options.results.parent))


def read(file: Path) -> dict[str, Any]:
    """Raw results.

    Raises ValueError where they have another schema.
    """
    results: dict[str, Any] = json.loads(file.read_text())
    if results.get("schema") != SCHEMA:
        raise ValueError(
            f"{file} has schema {results.get('schema')}, this page is made from {SCHEMA}: measure again"
        )
    return results


def write(results: dict[str, Any], folder: Path) -> Path:
    """Write benchmarks.md and its plots into a folder; gives the page."""
    page = folder / "benchmarks.md"
    page.write_text(text(results))
    draw(results["benchmarks"], folder)
    return page


def text(results: dict[str, Any]) -> str:
    """The page, in Markdown."""
    found = results["benchmarks"]
    lines = [*introduction(results), *table(["", "figure", "measured", ""], figures(found))]
    for name, section in SECTIONS.items():
        if name in found:
            lines += section(found[name])
    return "\n".join([*lines, *how_to_run(results)])


def introduction(results: dict[str, Any]) -> list[str]:
    """What was measured, on what, and how to read it."""
    quick = ["**A quick run, of a few rounds and small models: it shows that all runs, no more.**", ""]
    return [
        "# Benchmarks", "",
        "Made by `nox -s bench` from [its raw results](benchmarks.json); not written by hand.", "",
        *(quick if results["quick"] else []),
        *busy(results["benchmarks"]),
        *settings(results["benchmarks"]),
        *words("introduction"),
        "## Figures", "",
        "What Amanda is to reach, and whether the interval says that it does.", "",
    ]  # fmt: skip


def busy(benchmarks: dict[str, Any]) -> list[str]:
    """A warning, if others were at work."""
    loads = [load for one in benchmarks.values() for load in one["load"]]
    words = "**Other programs kept the machine busy meanwhile: intervals are wide, clock times too long.**"
    return [words, ""] if max(loads) > 1.5 else []


def settings(benchmarks: dict[str, Any]) -> list[str]:
    """Machine, versions and time of the benchmarks: a table for each machine that measured some."""
    groups: dict[str, list[str]] = {}
    for name, one in benchmarks.items():
        groups.setdefault(json.dumps([one["machine"], one["versions"]]), []).append(name)
    lines: list[str] = []
    for names in groups.values():
        members = [benchmarks[name] for name in names]
        took = sum(one["took"] for one in members)
        loads = [load for one in members for load in one["load"]]
        dates = " to ".join(sorted({one["date"] for one in members}))
        rows = [
            *members[0]["machine"].items(),
            *members[0]["versions"].items(),
            ("measured", f"{dates}, in {took // 60} min {took % 60} s"),
            ("load average", f"{min(loads)} to {max(loads)}; a benchmark alone makes 1"),
        ]
        title = "" if len(groups) == 1 else ", ".join(names)
        lines += table([title, ""], rows)
    return lines


def how_to_run(results: dict[str, Any]) -> list[str]:
    """The last section."""
    took = sum(one["took"] for one in results["benchmarks"].values())
    each = ", ".join(f"`{name}` {one['took']} s" for name, one in results["benchmarks"].items())
    return [
        "## Run it again", "",
        "```", "nox -s bench                      # everything, into docs/",
        "nox -s bench -- --quick           # everything once, into build/bench/",
        "nox -s bench -- ops steps         # some of it, into build/bench/",
        "nox -s bench -- ops --update      # some of it, the rest of docs/ as it was",
        "python benchmarks/page.py docs/benchmarks.json   # the page alone, from raw results", "```", "",
        f"It took {took // 60} min {took % 60} s here: {each}.", "", *words("again"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
