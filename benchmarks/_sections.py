"""The tables of the page, a section for each benchmark."""

from collections.abc import Iterable
from typing import Any

from _compiled_tables import compiled
from _estimates import Estimate, difference, median, quotient
from _figures import added, bare_seconds, share, to_mode
from _graph_tables import graphs
from _onnx_tables import sessions
from _profiling import profiling
from _ranks import distributed
from _rematerialisation import remat
from _resources import instructions, memory, startup
from _tables import table, with_span
from _whole_tools import tools
from _words import words


def ops(results: dict[str, Any]) -> list[str]:
    """Nanoseconds per op that each adds, and as a share of TorchFunctionMode's."""
    programs = results["programs"]
    names = list(dict.fromkeys(name for program in programs.values() for name in program["ns"]))

    def rows(cell: Any) -> Iterable[list[str]]:
        for name in names[1:]:
            yield [name, *(cell(one, name) if name in one["ns"] else "" for one in programs.values())]

    bare = ["bare", *(f"{median(one['ns']['bare']).middle:.0f}" for one in programs.values())]
    head = ["", *(f"`{name}`" if name.endswith(")") or "+" in name else name for name in programs)]
    return [
        "## Per op, forward", "",
        "![Nanoseconds added per op](benchmarks-ops.svg)", "",
        *words("ops"),
        *table(head, [bare, *rows(lambda one, name: with_span(added(one, name), ".0f"))]),
        "The same as a share of what a no-op TorchFunctionMode adds:", "",
        *table(head, rows(lambda one, name: f"{to_mode(one, name).middle:.3f}")),
    ]  # fmt: skip


def steps(results: dict[str, Any]) -> list[str]:
    """Shares of steps."""
    lines = [
        "## Steps of models", "",
        "![Percent added to a training step](benchmarks-steps.svg)", "",
        *words("steps"),
    ]  # fmt: skip
    models = results["models"]
    for title in next(iter(models.values()))["passes"]:
        found = {name: model["passes"][title] for name, model in models.items()}
        bare = [f"{bare_seconds(step) * 1e3:.0f} ms" for step in found.values()]
        variants = next(iter(found.values()))["twin"]
        rows = [["bare step", *bare]]
        for name in list(variants)[1:]:
            rows.append([name, *(in_steps(step, name) for step in found.values())])
        lines += [f"### {title.capitalize()}", "", *table(["", *examples(models)], rows)]
        counts = {name: step["seen"] for name, step in found.items()}
        lines += ["Calls that each sees in such a step:", ""]
        kinds = list(next(iter(counts.values())))
        body = [[kind, *(str(one[kind]) for one in counts.values())] for kind in kinds]
        lines += table(["", *models], body)
    return lines


def examples(models: dict[str, Any]) -> list[str]:
    """Models with what they are given."""
    return [f"{name}, {model['example']}" for name, model in models.items()]


def in_steps(step: dict[str, Any], name: str) -> str:
    """One cell: share by the twin, and what paired steps show."""
    paired = quotient(step["wide"][name], step["wide"]["bare"])
    percent = Estimate(*(100 * (value - 1) for value in paired))
    return f"{share(step, name).middle:.2f}; {with_span(percent, '.1f')}"


def backward(results: dict[str, Any]) -> list[str]:
    """Nanoseconds per backward op."""
    programs = results["programs"]
    names = list(next(iter(programs.values()))["ns"])
    bare = [f"{median(one['ns']['bare']).middle / one['nodes']:.0f}" for one in programs.values()]
    rows = [["bare", *bare]]
    for name in names[1:]:
        more = [
            difference(one["ns"][name], one["ns"]["bare"]).times(1 / one["nodes"])
            for one in programs.values()
        ]
        rows.append([name, *(with_span(one, ".0f") for one in more)])
    return [
        "## Per backward op", "",
        *words("backward"),
        *table(["", *(f"{name}, {one['nodes']} nodes" for name, one in programs.items())], rows),
    ]  # fmt: skip


def analysis(results: dict[str, Any]) -> list[str]:
    """Microseconds of first executions and of scopes."""
    first, later, ops = results["first"], results["later"], results["ops"]
    rows = [
        [name, with_span(difference(first[name], later[name]).times(1e-3 / ops), ".1f")] for name in first
    ]
    kinds = median([one - other for one, other in results["kinds"].values()]).times(1e-3)
    shares = [[name, f"{100 * part:.0f} %"] for name, part in results["shares"].items()]
    scopes = [
        [name, with_span(median(times).times(1e-3), ".1f")] for name, times in results["scopes"].items()
    ]
    return [
        "## Analysis", "",
        *words("analysis"),
        *table(["analysis", "us per op"], rows),
        f"The first op of a kind in a process takes {with_span(kinds, '.0f')} us on top: its schema is read.",
        "",
        *words("profile"),
        *table(["part", "share"], shares),
        "A scope, opened and closed, in microseconds:", "",
        *table(["", "us"], scopes),
    ]  # fmt: skip


def cache(results: dict[str, Any]) -> list[str]:
    """Steps of a pruning tool with the cache on and off."""
    rows = []
    for model, passes in results["models"].items():
        for title, times in passes.items():
            cells = [f"{median(times[name]).middle * 1e3:.0f}" for name in ("bare", "cache on", "cache off")]
            rows.append(
                [
                    f"{model}, {title}",
                    *cells,
                    with_span(quotient(times["cache off"], times["cache on"]), ".1f"),
                ]
            )
    return [
        "## The cache", "",
        *words("cache"),
        *table(["", "bare", "cache on", "cache off", "off over on"], rows),
    ]  # fmt: skip


SECTIONS = {
    "ops": ops, "steps": steps, "backward": backward, "analysis": analysis, "cache": cache,
    "graphs": graphs, "sessions": sessions, "startup": startup, "memory": memory,
    "instructions": instructions, "profiling": profiling, "tools": tools, "remat": remat,
    "compiled": compiled, "distributed": distributed,
}  # fmt: skip
