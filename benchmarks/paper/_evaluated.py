"""Values of the paper's figures, from the measurements, and cells of their tables."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _estimates import Estimate, difference, median, percent
from _figures import worth as worth_of
from _tables import grid

Results = dict[str, Any]
Cells = dict[str, str]
EAGER, GRAPH = "PyTorch, eager", "TensorFlow, session"
NEEDED: dict[str, dict[str, str]] = {
    "8": {EAGER: "kernels"},
    "9": {EAGER: "covered"},
    "10": {EAGER: "overhead_eager", GRAPH: "overhead_graph"},
    "11": {EAGER: "overhead_eager", GRAPH: "overhead_graph"},
    "12": {EAGER: "cache_eager", GRAPH: "cache_graph"},
    "13": {EAGER: "footprint_eager", GRAPH: "footprint_graph"},
}
"""The scripts that measure each figure."""


def by_figure(found: Results) -> dict[str, dict[str, Results]]:
    """Return the measurements of each figure, by mode; no figure that has none."""
    figures = {
        figure: {mode: found[name] for mode, name in scripts.items() if is_measured(found, name)}
        for figure, scripts in NEEDED.items()
    }
    return {figure: modes for figure, modes in figures.items() if modes}


def is_measured(found: Results, name: str) -> bool:
    """Return True if a script has given results."""
    return name in found and "missing" not in found[name]


def unmeasured(found: Results) -> list[str]:
    """Return the figures, with their modes, that a page is without."""
    return [
        f"figure {figure} in {mode}"
        for figure, scripts in NEEDED.items()
        for mode, name in scripts.items()
        if not is_measured(found, name)
    ]


def whole(mode: str, model: Results, case: str) -> Estimate:
    """Return the percent that a use case adds to a model's step."""
    times = model["wide"]["whole"] if mode == EAGER else model["wide"]
    return percent(times[case], times["bare"])


def noise(mode: str, model: Results) -> Estimate:
    """Return the percent that the bare step seems to add to itself."""
    return whole(mode, model, "bare again")


def framework(mode: str, model: Results, case: str) -> Estimate:
    """Return the percent of the model's bare step that Amanda itself adds, without the step's noise."""
    if mode == EAGER:
        return framework_share(model, case)
    twin = model["twin"]
    return difference(twin[f"{case}, hollow"], twin["bare"]).times(100 / bare_seconds(mode, model))


def framework_share(step: Results, name: str) -> Estimate:
    """Return the percent of the bare step that a tool adds to the twin's beside the time in its routines."""
    twin = step["twin"]
    outside = np.asarray(twin["whole"][name]) - np.asarray(twin["inside"][name])
    return difference(outside, twin["whole"]["bare"]).times(100 / bare_step(step))


def bare_step(step: Results) -> float:
    """Return the seconds of the model's own step."""
    return median(step["wide"]["whole"]["bare"]).middle


def bare_seconds(mode: str, model: Results) -> float:
    """Return the seconds of a bare step of the model."""
    return bare_step(model) if mode == EAGER else median(model["wide"]["bare"]).middle


def routines(mode: str, model: Results, case: str) -> float:
    """Return the percent of the bare step that a use case takes itself: in PyTorch by a clock around it."""
    if mode == EAGER:
        return median(model["wide"]["inside"][case]).middle / bare_seconds(mode, model) * 100
    return max(0.0, whole(mode, model, case).middle - framework(mode, model, case).middle)


def part(mode: str, model: Results, case: str) -> float:
    """Return Amanda's share of the time that it and a use case take, from 0 to 1."""
    own = max(0.0, framework(mode, model, case).middle)
    both = own + routines(mode, model, case)
    return own / both if both else 0.0


def by_case(mode: str, results: Results, value: Callable[[str, Results, str], Any]) -> dict[str, Results]:
    """Return `value` of each model and use case."""
    first = next(iter(results["models"].values()))
    names = first.get("cases") or (first["twin"]["inside"] if mode == EAGER else first["wide"])
    cases = [name for name in names if not name.startswith("bare")]
    return {
        name: {case: value(mode, model, case) for case in cases} for name, model in results["models"].items()
    }


def by_primitive(op: Results) -> dict[str, float]:
    """Return milliseconds of an op's kernels by their implementation, without its instruction set."""
    sums: dict[str, float] = {}
    for name, (_, taken) in op["kernels"].items():
        primitive, implementation, *_ = name.split(", ")
        short = f"{primitive}, {implementation.rpartition(':')[0] or implementation}"
        sums[short] = sums.get(short, 0.0) + taken
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def worth(mode: str, model: Results, case: str) -> Estimate:
    """Return a step without the cache over one with it."""
    return worth_of(model["cases"][case])


def shares(results: Results) -> Iterator[tuple[str, int, str, float, float]]:
    """Yield model, batch, use case, and percent of the peak that Amanda holds and that all of it holds."""
    for model, batches in results["models"].items():
        for batch, found in batches.items():
            for case, bytes in found["cases"].items():
                own, both = (100 * bytes[key] / found["peak"] for key in ("framework", "whole"))
                yield model, int(batch), case, own, both


def shares_of_kernels(op: Results) -> str:
    """Return a cell of figure 8: the shares of an op's time that its kernels take."""
    return "; ".join(f"{name} {100 * taken / op['ms']:.0f} %" for name, taken in by_primitive(op).items())


def convolutions(op: Results) -> int:
    """Return the number of convolutions among the kernels of an op."""
    return sum(count for name, (count, _) in op["kernels"].items() if name.startswith("conv"))


def by_mode(
    modes: Results,
    cell: Callable[[str, Results, str], Any],
    first: Callable[[str, Results], Cells] = lambda *_: {},
    example: bool = True,
) -> Iterator[tuple[str, str]]:
    """Yield for each mode a table with a row for each use case and a column for each model.

    first: rows before those.  example: named beside the model.
    """
    for mode, found in modes.items():
        columns = {}
        for name, cells in by_case(mode, found, cell).items():
            model = found["models"][name]
            columns[f"{name}, {model['example']}" if example else name] = first(mode, model) | cells
        yield mode, grid(columns)


def bare(mode: str, model: Results) -> Cells:
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


def gain(mode: str, model: Results, case: str) -> str:
    """Return a cell of figure 12."""
    return f"{worth(mode, model, case):.1f}"


def mean_gains(mode: str, models: Results) -> list[str]:
    """Return the last row of figure 12."""
    cells = by_case(mode, {"models": models}, lambda *case: worth(*case).middle).values()
    return [f"{np.mean(list(one.values())):.1f}" for one in cells]


def footprint(batch: Results) -> Cells:
    """Return the cells of figure 13 by their heads."""
    rows = shares({"models": {"": {"1": batch}}})
    return {f"{case}: Amanda; with the tool": f"{own:.1f}; {both:.1f}" for *_, case, own, both in rows}
