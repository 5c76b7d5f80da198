"""The tables about compiled models."""

from typing import Any

from _estimates import median, quotient
from _tables import table, with_span
from _words import words


def compiled(results: dict[str, Any]) -> list[str]:
    """Steps with tools in compiled graphs, over the compiled step."""
    models = results["models"]
    columns = [(name, title) for name, model in models.items() for title in model["passes"]]
    steps = [models[name]["passes"][title] for name, title in columns]
    head = ["", *(f"{name}, {models[name]['example']}, {title}" for name, title in columns)]
    rows = [["compiled step", *(f"{median(step['bare']).middle * 1e3:.0f} ms" for step in steps)]]
    for variant in list(steps[0])[1:]:
        rows.append([variant, *(with_span(quotient(step[variant], step["bare"]), ".3f") for step in steps)])
    return ["## Compiled models", "", *words("compiled"), *table(head, rows)]
