"""What the measurements come to, figure by figure; see `_said.py` for what the paper says of each."""

from collections.abc import Iterator
from typing import Any

from _estimates import Estimate, difference, median, quotient
from _figures import bare_step, framework_share
from _figures import worth as worth_of

Results = dict[str, Any]
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
    """For each figure what was measured, by mode; none that has nothing."""
    figures = {
        figure: {mode: found[name] for mode, name in scripts.items() if measured(found, name)}
        for figure, scripts in NEEDED.items()
    }
    return {figure: modes for figure, modes in figures.items() if modes}


def measured(found: Results, name: str) -> bool:
    """Whether a script has given results."""
    return name in found and "missing" not in found[name]


def unmeasured(found: Results) -> list[str]:
    """Figures, with their modes, that a page is without."""
    return [
        f"figure {figure} in {mode}"
        for figure, scripts in NEEDED.items()
        for mode, name in scripts.items()
        if not measured(found, name)
    ]


def whole(mode: str, model: Results, case: str) -> Estimate:
    """Percent that a use case adds to a model's step."""
    times = model["wide"]["whole"] if mode == EAGER else model["wide"]
    return percent(quotient(times[case], times["bare"]))


def noise(mode: str, model: Results) -> Estimate:
    """Percent that the bare step seems to add to itself."""
    return whole(mode, model, "bare again")


def percent(ratio: Estimate) -> Estimate:
    """What a ratio is more than one."""
    return Estimate(*(100 * (value - 1) for value in ratio))


def framework(mode: str, model: Results, case: str) -> Estimate:
    """Percent of the model's bare step that Amanda itself adds, without the step's noise."""
    if mode == EAGER:
        return framework_share(model, case)
    twin = model["twin"]
    return difference(twin[f"{case}, hollow"], twin["bare"]).times(100 / bare_seconds(mode, model))


def bare_seconds(mode: str, model: Results) -> float:
    """A bare step of the model."""
    return bare_step(model) if mode == EAGER else median(model["wide"]["bare"]).middle


def routines(mode: str, model: Results, case: str) -> float:
    """Percent of the bare step that a use case takes itself: in PyTorch by a clock around its routines."""
    if mode == EAGER:
        return median(model["wide"]["inside"][case]).middle / bare_seconds(mode, model) * 100
    return max(0.0, whole(mode, model, case).middle - framework(mode, model, case).middle)


def part(mode: str, model: Results, case: str) -> float:
    """Of what Amanda and a use case take, the share that Amanda does, from 0 to 1."""
    own = max(0.0, framework(mode, model, case).middle)
    both = own + routines(mode, model, case)
    return own / both if both else 0.0


def cases(mode: str, results: Results) -> list[str]:
    """The use cases that were measured."""
    first = next(iter(results["models"].values()))
    if "cases" in first:
        return list(first["cases"])
    return [name for name in (first["twin"]["inside"] if mode == EAGER else first["wide"])
            if not name.startswith("bare")]  # fmt: skip


def by_primitive(op: Results) -> dict[str, float]:
    """Milliseconds of an op's kernels by their implementation, without the instruction set it is for."""
    sums: dict[str, float] = {}
    for name, (_, taken) in op["kernels"].items():
        primitive, implementation, *_ = name.split(", ")
        short = f"{primitive}, {implementation.rpartition(':')[0] or implementation}"
        sums[short] = sums.get(short, 0.0) + taken
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def worth(model: Results, case: str) -> Estimate:
    """A step without the cache over one with it."""
    return worth_of(model["cases"][case])


def shares(results: Results) -> Iterator[tuple[str, int, str, float, float]]:
    """Model, batch, use case, and percent of the peak that Amanda holds and that all of it holds."""
    for model, batches in results["models"].items():
        for batch, found in batches.items():
            for case, bytes in found["cases"].items():
                own, both = (100 * bytes[key] / found["peak"] for key in ("framework", "whole"))
                yield model, int(batch), case, own, both
