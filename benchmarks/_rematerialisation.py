"""The page's tables of training within a budget."""

from typing import Any

from _estimates import quotient
from _tables import table, with_span
from _words import words


def remat(results: dict[str, Any]) -> list[str]:
    """Time over the bare step, peak and ops that ran again, by budget."""
    lines = ["## Training within a budget of memory", "", *words("remat")]
    for name, model in results["models"].items():
        seconds = model["seconds"]
        rows = [
            [
                title, with_span(quotient(seconds[title], seconds["bare"]), ".2f"), f"{came['peak']:.0%}",
                f"{came['again']:.0f}",
            ]
            for title, came in model["came"].items()
        ]  # fmt: skip
        head = ["budget", "time over bare", "peak", "ops that ran again, a step"]
        lines += [f"{name}, {model['example']}, {model['bytes'] / 1e6:.0f} MB without a budget:", ""]
        lines += table(head, rows)
    return lines
