"""The page docs/paper-evaluation.md, made from its raw results."""

from collections.abc import Callable
from typing import Any

import numpy as np
from _beside import beside
from _drawn import PLOTS
from _evaluated import (
    EAGER,
    Results,
    bare_seconds,
    by_case,
    by_figure,
    by_primitive,
    framework,
    noise,
    part,
    routines,
    shares,
    unmeasured,
    whole,
    worth,
)
from _pages import Page
from _tables import grid, table

Tables = dict[str, Any]


def kernels(modes: Results) -> Tables:
    """Figure 8, of the eight types of operators that take most time."""
    ops = modes[EAGER]["ops"]
    every = sum(op["ms"] for op in ops)
    types = (
        [
            *(op["type"], op["phase"], op["calls"], f"{op['ms']:.2f}", f"{100 * op['ms'] / every:.1f} %"),
            "; ".join(f"{name} {100 * taken / op['ms']:.0f} %" for name, taken in by_primitive(op).items()),
        ]
        for op in ops[:8]
    )
    head = ["operator", "phase", "calls", "ms", "of the step", "kernels of oneDNN, of the operator's time"]
    convolutions = next(op for op in ops if op["type"] == "conv2d")
    runs = convolutions["kernels"].items()
    mine = sum(count for name, (count, _) in runs if name.startswith("conv"))
    return {
        "types": table(head, types, words=True),
        "kernels_of": f"{mine} of {convolutions['calls']}",
        "kernels": table(
            ["kernel", "runs", "ms"], ([f"`{name}`", count, f"{taken:.2f}"] for name, (count, taken) in runs)
        ),
    }


def coverage(modes: Results) -> Tables:
    """Figure 9."""
    rows = []
    for model, phases in modes[EAGER]["models"].items():
        counts = [phases["forward"], phases["backward"]]
        cells = [(one["all"], one["hooks"], one["all"] - one["hooks"]) for one in counts]
        rows.append([model, *cells[0], *cells[1], counts[1]["accumulation"]])
    head = ["", "forward: Amanda", "module hooks", "missed", "backward: Amanda", "module hooks", "missed",
            "of these accumulate gradients"]  # fmt: skip
    return {"models": table(head, rows)}


def in_modes(
    cell: Callable[[str, Results, str], str], first: Any = None, last: Any = None, example: bool = True
) -> Callable[[Results], Tables]:
    """Return a section with a table for each mode: a row for each use case, a column for each model.

    first, last: of a mode and a model, the rows before and after.  example: named beside the model.
    """

    def section(modes: Results) -> Tables:
        tables = []
        for mode, found in modes.items():
            columns = {}
            for name, cells in by_case(mode, found, cell).items():
                model = found["models"][name]
                title = f"{name}, {model['example']}" if example else name
                columns[title] = {
                    **(first(mode, model) if first else {}),
                    **cells,
                    **(last(mode, model) if last else {}),
                }
            tables.append((mode, grid(columns)))
        return {"modes": tables}

    return section


def bare(mode: str, model: Results) -> dict[str, str]:
    """Return the rows of the bare step."""
    return {
        "bare step": f"{bare_seconds(mode, model) * 1e3:.0f} ms",
        "bare again": f"{noise(mode, model):.1f}",
    }


def added(mode: str, model: Results, case: str) -> str:
    """Return a cell of figure 10."""
    return f"{whole(mode, model, case):.1f}; Amanda {framework(mode, model, case):.2f}"


def parted(mode: str, model: Results, case: str) -> str:
    """Return a cell of figure 11; a dash where all that is added is less than the noise."""
    if mode != EAGER and whole(mode, model, case).low <= noise(mode, model).high:
        return "-"
    own, other = 100 * part(mode, model, case), routines(mode, model, case)
    return f"{own:.0f} ({other:.1f} % of the step is the tool's)"


def mean(mode: str, model: Results) -> dict[str, str]:
    """Return the row of the mean of the cache's worth."""
    return {"mean": f"{np.mean([worth(mode, model, case).middle for case in model['cases']]):.1f}"}


def memory(modes: Results) -> Tables:
    """Figure 13."""
    tables = []
    for mode, found in modes.items():
        rows: dict[str, dict[str, str]] = {}
        for model, batch, case, own, both in shares(found):
            here = rows.setdefault(f"{model}, batch of {batch}", {})
            here[f"{case}: Amanda; with the tool"] = f"{own:.1f}; {both:.1f}"
        each = [one for batches in found["models"].values() for one in batches.values()]
        for row, one in zip(rows.values(), each, strict=True):
            row["once, MiB"] = f"{one['first time'] / 2**20:.1f}"
            row["peak, MiB"] = f"{one['peak'] / 2**20:.0f}"
        head = ["", *next(iter(rows.values()))]
        tables.append((mode, table(head, ([name, *row.values()] for name, row in rows.items()))))
    return {"modes": tables}


SECTIONS: dict[str, Callable[[Results], Tables]] = {
    "8": kernels,
    "9": coverage,
    "10": in_modes(added, first=bare),
    "11": in_modes(parted, example=False),
    "12": in_modes(lambda *case: f"{worth(*case):.1f}", last=mean),
    "13": memory,
}


def values(found: Results) -> dict[str, Any]:
    """Return the tables of each figure, and the differences to the paper."""
    figures = by_figure(found)
    one = next(iter(found.values()))
    return {
        "unmeasured": unmeasured(found),
        "processor": one["machine"]["processor"].partition(" (")[0],
        "versions": one["versions"],
        "beside": table(["figure", "what", "in the paper", "here", ""], beside(figures), words=True),
        "figures": {figure: SECTIONS[figure](modes) for figure, modes in figures.items()},
    }


PAGE = Page("paper-evaluation", 1, "measured", values, PLOTS, by_figure)
read, text = PAGE.read, PAGE.text
