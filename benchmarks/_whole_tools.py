"""The page's tables of whole tools on models."""

from typing import Any

from _estimates import median, quotient
from _figures import bare_step, framework_share, worth
from _tables import table, with_span
from _words import words


def tools(results: dict[str, Any]) -> list[str]:
    """Shares of steps, in the routines and in the framework; then steps without the cache."""
    lines = ["## Whole tools", "", *words("tools")]
    models = results["models"]
    heads = [f"{name}, {model['example']}" for name, model in models.items()]
    for title in next(iter(models.values()))["passes"]:
        found = [model["passes"][title] for model in models.values()]
        rows = [["bare step", *(f"{bare_step(step) * 1e3:.0f} ms" for step in found)]]
        rows += [[name, *(_parts(step, name) for step in found)] for name in found[0]["cache"]]
        lines += [f"{title.capitalize()}, percent of the bare step:", "", *table(["", *heads], rows)]
    lines += ["### Without the cache", "", *words("tools' cache")]
    columns = [(model, title) for model, one in models.items() for title in one["passes"]]
    caches = [models[model]["passes"][title]["cache"] for model, title in columns]
    rows = [[name, *(with_span(worth(one[name]), ".1f") for one in caches)] for name in caches[0]]
    return [*lines, *table(["", *(f"{model}, {title}" for model, title in columns)], rows)]


def _parts(step: dict[str, Any], name: str) -> str:
    inside = median(step["wide"]["inside"][name]).times(100 / bare_step(step))
    whole = quotient(step["wide"]["whole"][name], step["wide"]["whole"]["bare"]).middle * 100 - 100
    own = with_span(framework_share(step, name), ".2f")
    return f"{whole:.1f}: routines {inside.middle:.1f}, framework {own}"
