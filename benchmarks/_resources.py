"""The sections of what is not a step's time: startup, memory, instructions."""

from typing import Any

from _estimates import median
from _figures import MODE, held
from _tables import table, with_span
from _words import words


def startup(results: dict[str, Any]) -> list[str]:
    """Seconds of processes, of moments and of builds."""
    rows = [[f"`{name}`", f"{median(times).middle:.2f} s"] for name, times in results["processes"].items()]
    moments = [
        [name, with_span(median(times).times(1e3), ".1f")] for name, times in results["moments"].items()
    ]
    builds = ", ".join(f"{seconds:.1f}" for seconds in results["builds"])
    return [
        "## Startup", "",
        "A fresh process, by the clock on the wall:", "", *table(["program", "takes"], rows),
        "Within one that has imported torch, in milliseconds:", "", *table(["", "ms"], moments),
        f"Compiling the native interceptor, as an install without a cached build does: {builds} s.", "",
    ]  # fmt: skip


def memory(results: dict[str, Any]) -> list[str]:
    """What is held in the middle of a step, and the growth over iterations."""
    if "missing" in results:
        return ["## Memory", "", f"Not measured: {results['missing']}.", ""]
    rows = []
    for model, tools in results["shares"].items():
        for tool, at in tools.items():
            parts = [
                at["import"] - at["after a bare step"], at["first scope"] - at["import"],
                at["during"] - at["bare"], at["after"] - at["after a bare step"],
                at["peak"] - at["start"],
            ]  # fmt: skip
            cells = [f"{part / 2**20:.1f}" for part in parts]
            rows.append([f"{model}, {tool}", *cells, f"{held(at):.2f} %"])
    head = [
        "",
        "import",
        "first scope",
        "in a step",
        "after it",
        "peak of the bare step",
        "in a step, of the peak",
    ]
    return [
        "## Memory", "",
        *words("memory"),
        *table(head, rows),
        "![Bytes in use over iterations](benchmarks-memory.svg)", "",
        *words("growth"),
    ]  # fmt: skip


def instructions(results: dict[str, Any]) -> list[str]:
    """Instructions per op in each state."""
    if "missing" in results:
        return ["## Instructions", "", f"Not measured: {results['missing']}.", ""]
    programs = results["programs"]
    states = sorted({state for counts in programs.values() for state in counts}, key=_in_order)

    def rows(cell: Any) -> list[list[str]]:
        return [
            [state, *(cell(one, state) if state in one else "" for one in programs.values())]
            for state in states
        ]

    head = ["", *(f"`{name}`" for name in programs)]
    shares = rows(more_of_mode)[2:] if MODE in states else []  # a quick run counts few states
    return [
        "## Instructions", "",
        *words("instructions"),
        *table(head, rows(lambda one, state: f"{one[state][0]:,.0f}")),
        "What is more than of torch alone, as a share of what is so with a no-op TorchFunctionMode:", "",
        *table(head, shares),
        "Of all these are the interceptor's own:", "",
        *table(head, rows(lambda one, state: f"{one[state][1]:,.0f}")),
        *(words("routines") + table(head, owners_of_routines(results)) if MODE in states else []),
    ]  # fmt: skip


def owners_of_routines(results: dict[str, Any]) -> list[list[str]]:
    """Whose instructions they are that a routine before and one after an op add, and the mode's for scale."""

    def added(counts: dict[str, list[float]], state: str) -> list[float]:
        return [one - other for one, other in zip(counts[state], counts["torch alone, again"], strict=True)]

    programs = results["programs"]
    columns = [added(counts, "before + after") for counts in programs.values()]
    rows = [["all", *(f"{one[0]:,.0f}" for one in columns)]]
    for place, owner in enumerate(results["owners"], 1):
        rows.append([f"of {owner}", *(f"{one[place]:,.0f}" for one in columns)])
    modes = [added(counts, MODE)[0] for counts in programs.values()]
    return [*rows, ["a fifth of the mode's", *(f"{one / 5:,.0f}" for one in modes)]]


def more_of_mode(counts: dict[str, list[float]], state: str) -> str:
    """Instructions of a state that are more than torch's, as a share of the mode's."""
    base, mode = counts["torch alone, again"][0], counts[MODE][0]
    return f"{(counts[state][0] - base) / (mode - base):.3f}"


def _in_order(state: str) -> int:
    order = (
        "torch alone", "torch alone, again", "after import amanda", "after scopes", "after all",
        "scope in another thread", "disabled in a scope", "empty tool", "before + after", "TorchFunctionMode",
        "TorchDispatchMode", "monkey-patch", "module hooks",
    )  # fmt: skip
    return order.index(state)
