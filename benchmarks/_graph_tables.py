"""The page's tables of TensorFlow's graphs."""

from typing import Any

from _estimates import difference, median, quotient
from _tables import table, with_span
from _words import words


def graphs(results: dict[str, Any]) -> list[str]:
    """Calls, steps, rewrites, cache."""
    return [
        "## TensorFlow's graphs", "", *words("graphs"),
        "### Calls", "", *words("hits"), *hits(results["hits"]),
        "### Steps under tools", "", *steps(results["steps"]),
        "### Rewrites", "", *words("rewrites"), *rewrites(results["rewrites"]),
        "### Without the cache", "", *words("graph cache"),
        *cache({**results["cache"], **results.get("short cache", {})}),
    ]  # fmt: skip


def hits(modes: dict[str, Any]) -> list[str]:
    """Microseconds per call."""
    names = list(next(iter(modes.values())))
    rows = [["bare", *(f"{median(times['bare']).middle:.0f}" for times in modes.values())]]
    for name in names[1:]:
        rows.append(
            [name, *(with_span(difference(times[name], times["bare"]), ".0f") for times in modes.values())]
        )
    return table(["", *modes], rows)


def steps(models: dict[str, Any]) -> list[str]:
    """Milliseconds of bare steps, and ratios to them."""
    lines: list[str] = []
    for title in next(iter(models.values()))["passes"]:
        found = {name: model["passes"][title] for name, model in models.items()}
        rows = [["bare", *(f"{median(step['bare']).middle * 1e3:.0f} ms" for step in found.values())]]
        for name in list(next(iter(found.values())))[1:]:
            cells = (with_span(quotient(step[name], step["bare"]), ".3f") for step in found.values())
            rows.append([name, *cells])
        examples = [f"{name}, {model['example']}" for name, model in models.items()]
        lines += [f"{title.capitalize()}, over the bare step:", "", *table(["", *examples], rows)]
    return lines


def rewrites(modes: dict[str, Any]) -> list[str]:
    """Seconds of rewrites."""
    rows = []
    for mode, found in modes.items():
        for what, runs in found.items():
            took = median([run["seconds"] for run in runs])
            bare = [run["bare"] for run in runs if "bare" in run]
            own = f"{median(bare).middle:.2f}" if bare else ""
            counts = [f"{runs[0]['ops']:,}", f"{runs[0]['actions']:,}"]
            rows.append([f"{what}, {mode}", *counts, own, with_span(took, ".2f")])
    return table(["", "ops", "actions", "TensorFlow's own", "seconds"], rows)


def cache(models: dict[str, Any]) -> list[str]:
    """Milliseconds of steps under each task's tool."""
    rows = []
    for model, passes in models.items():
        for title, times in passes.items():
            cells = [f"{median(times[name]).middle * 1e3:.0f}" for name in ("bare", "cache on", "cache off")]
            worth = with_span(quotient(times["cache off"], times["cache on"]), ".1f")
            rows.append([f"{model}, {title}", *cells, worth])
    return table(["", "bare", "cache on", "cache off", "off over on"], rows)
