"""The page's table of training over ranks."""

from typing import Any

from _estimates import median, quotient
from _tables import table, with_span
from _words import words


def distributed(results: dict[str, Any]) -> list[str]:
    """Time of a step over the bare one, by what wraps the model."""
    head: list[str] = []
    rows = []
    for name, seconds in results["seconds"].items():
        others = [variant for variant in seconds if variant != "bare"]
        head = ["", "bare, ms", *others]
        ratios = [with_span(quotient(seconds[variant], seconds["bare"]), ".2f") for variant in others]
        rows.append([name, f"{median(seconds['bare']).middle * 1e3:.2f}", *ratios])
    lines = [f"## Training over {results['ranks']} ranks", "", *words("distributed")]
    return [*lines, f"{results['model']}:", "", *table(head, rows)]
