"""The page docs/paper-evaluation.md, made from its raw results."""

import json
from pathlib import Path
from typing import Any

from _beside import beside
from _drawn import PLOTS
from _evaluated import by_figure, unmeasured
from _plots import draw
from _said import DIFFERS, said
from _shown import SECTIONS
from _tables import table
from page import busy, settings

SCHEMA = 1
"""Of raw results; it grows when what is in there means something else."""
NAME = "paper-evaluation"


def read(file: Path) -> dict[str, Any]:
    """Raw results.

    Raises ValueError where they have another schema.
    """
    results: dict[str, Any] = json.loads(file.read_text())
    if results.get("schema") != SCHEMA:
        raise ValueError(f"{file} has schema {results.get('schema')}, this page is made from {SCHEMA}")
    return results


def write(results: dict[str, Any], folder: Path) -> Path:
    """Write the page and its plots into a folder; gives the page."""
    page = folder / f"{NAME}.md"
    page.write_text(text(results))
    draw(by_figure(results["measured"]), folder, PLOTS, NAME)
    return page


def text(results: dict[str, Any]) -> str:
    """The page, in Markdown."""
    found = results["measured"]
    figures = by_figure(found)
    quick = ["**A quick run, of one round and small models: it shows that all runs, no more.**", ""]
    lines = [
        "# The paper's evaluation, here", "",
        f"Made by `python benchmarks/paper/run.py` from [raw results]({NAME}.json); not written by hand.", "",
        *(quick if results["quick"] else []),
        *said("introduction"), *without(found), *busy(found), *settings(found), *said("numbers"),
        "## What differs", "", *differences(found),
        "## Beside the paper", "",
        *table(["figure", "what", "in the paper", "here", ""], beside(figures), words=True),
    ]  # fmt: skip
    for figure, (title, section) in SECTIONS.items():
        if figure in figures:
            picture = [f"![Figure {figure}: {title}]({NAME}-{figure}.svg)", ""]
            lines += [f"## Figure {figure}: {title}", "", *picture, *section(figures[figure])]
    return "\n".join([*lines, *how_to_run(found)])


def without(found: dict[str, Any]) -> list[str]:
    """What is not on the page yet."""
    gone = unmeasured(found)
    return [f"**Not measured yet: {', '.join(gone)}.**", ""] if gone else []


def differences(found: dict[str, Any]) -> list[str]:
    """A table of what was otherwise in the paper."""
    one = next(iter(found.values()))
    known = {
        "processor": one["machine"]["processor"].partition(" (")[0],
        "torch": one["versions"]["torch"],
        "tf": one["versions"]["tensorflow-cpu"],
    }
    rows = ([what, paper, here.format(**known)] for what, paper, here in DIFFERS)
    return table(["", "the paper", "here"], rows, words=True)


def how_to_run(found: dict[str, Any]) -> list[str]:
    """The last section."""
    took = sum(one["took"] for one in found.values())
    each = ", ".join(f"`{name}` {one['took']} s" for name, one in found.items())
    return [
        "## Run it again", "",
        "```", "nox -s paper                  # every figure, into docs/",
        "nox -s paper -- --quick       # everything once with small models, into build/paper/",
        "nox -s paper -- 9 13          # these figures; the rest of docs/ as it was",
        "nox -s paper -- --missing     # what is not there yet, or of other versions or machines",
        "nox -s paper -- --page        # the page alone, from raw results", "```", "",
        f"It took {took // 60} min {took % 60} s here: {each}.", "", *said("again"),
    ]  # fmt: skip
