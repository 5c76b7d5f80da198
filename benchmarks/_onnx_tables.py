"""The page's tables of sessions of ONNX Runtime."""

from typing import Any

from _estimates import median, quotient
from _tables import table, with_span
from _words import words


def sessions(results: dict[str, Any]) -> list[str]:
    """Runs under tools as shares of bare ones, and what the first takes."""
    lines = ["## Sessions of ONNX Runtime", "", *words("sessions")]
    for title, model in results["models"].items():
        runs, first = model["runs"], model["first"]
        bare = ["bare", *(f"{median(times['bare']).middle * 1e3:.1f} ms" for times in runs.values())]
        rows = [bare]
        for name in list(next(iter(runs.values())))[1:]:
            rows.append(
                [name, *(with_span(quotient(times[name], times["bare"]), ".3f") for times in runs.values())]
            )
        lines += [f"### {title}, {model['nodes']} nodes", "", *table(["", *runs], rows)]
        made = [
            [name, *(f"{mode[name]:.2f}" for mode in first.values())] for name in next(iter(first.values()))
        ]
        lines += [*words("first sessions"), *table(["", *first], made)]
    return lines
