"""Tables of the page of benchmarks that take more than a line of its template."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _estimates import difference, median, quotient
from _figures import MODE, Results, bare_seconds, share, to_mode
from _tables import against, grid, table

STATES = (
    "torch alone", "torch alone, again", "after import amanda", "after scopes", "after all",
    "sentinel, step not watched", "scope in another thread", "disabled in a scope", "empty tool",
    "before + after", "TorchFunctionMode", "TorchDispatchMode", "monkey-patch", "module hooks",
)  # fmt: skip
"""Rows of the tables of instructions."""


PEERS = {
    "flops": "FlopCounterMode", "nan": "detect_anomaly", "profile": "torch.profiler", "trace": "TorchLens",
    "stats": "", "prune": "torch.nn.utils.parametrize", "quantize": "torch.ao FakeQuantize",
}  # fmt: skip
"""Tools, and what else does the same work."""
PROGRAMS = {
    "ResNet-50": "ResNet-50", "RegNetY": "RegNetY-200MF", "BERT": "BERT, 4 layers of 128",
    "Llama": "Llama, 16 new tokens", "20 linear": "20 linear layers of 32",
}  # fmt: skip
"""Programs from those with much to compute in each op to those with little: how each begins, and in short."""


def programs(peers: Results) -> dict[str, dict[str, Any]]:
    """Return the seconds of the programs that show most, by their short names."""
    every = {**peers["programs"], **peers["steps"]["forward + backward"]}
    return {
        title: times
        for start, title in PROGRAMS.items()
        for name, times in every.items()
        if name.startswith(start)
    }


def ratio(times: dict[str, Any], name: str) -> float:
    """Return the seconds of a variant over those of the bare program."""
    return quotient(times[name], times["bare"]).middle


def costs(peers: Results) -> str:
    """Return a table of processor time under tools over the bare program's, and under the peers."""
    columns = {}
    first_step = "slowest first step of these tools, over a bare step"
    for title, times in programs(peers).items():
        milliseconds = median(times["bare"]).middle * 1e3
        columns[title] = {"alone": f"{milliseconds:{'.0f' if milliseconds >= 10 else '.2g'}} ms"} | {
            f"{tool} ({peer})" if peer else tool: f"{ratio(times, tool):.2f}"
            + (f" ({ratio(times, peer):.2f})" if peer in times else "")
            for tool, peer in PEERS.items()
        }
        columns[title][first_step] = "not measured"
        for model, tools in peers["first"].items():
            if model.startswith(title[:4]):
                largest = max(ratio(times, "first") for times in tools.values())
                columns[title][first_step] = f"{largest:.1f} x"
    return grid(columns)


def first_steps(first: Results) -> str:
    """Return the first step under each tool over a bare step."""
    return grid(
        {
            model: {tool: f"{quotient(times['first'], times['bare']):.1f}" for tool, times in tools.items()}
            for model, tools in first.items()
        }
    )


def counted_steps(results: Results) -> str:
    """Return instructions of a step: all, over the bare step's, and the interceptor's own; peers' beside."""
    counts = results["step"]
    bare, rows = counts["bare"][0], []
    for name in ("bare", "bare again", *PEERS):
        every, own, *_ = counts[name]
        peer = counts.get(PEERS.get(name, ""))
        beside = f"{PEERS[name]}: {peer[0] / bare:.3f}" if peer else ""
        rows.append((name, f"{every:,.0f}", f"{every / bare:.3f}", f"{own:,.0f}", beside))
    return table(["", "instructions", "over bare", "of the interceptor", "its peer, over bare"], rows)


def by_pass(models: Results) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield for each pass the steps of all models with their examples."""
    for title in next(iter(models.values()))["passes"]:
        yield title, {f"{name}, {one['example']}": one["passes"][title] for name, one in models.items()}


def by_model(models: Results, example: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield model and pass, with the model's example or without, and the step."""
    for name, one in models.items():
        for title, step in one.get("passes", one).items():
            yield f"{name}, {one['example']}, {title}" if example else f"{name}, {title}", step


def by_example(models: Results) -> dict[str, Any]:
    """Return the seconds of steps of models by their names and examples."""
    return {f"{name}, {one['example']}": one["seconds"] for name, one in models.items()}


def named(faults: Results) -> list[str]:
    """Return for each fault how many of the ops that had one were named."""
    return [f"{one['named']} of {one['made']}" for one in faults.values()]


def code(program: str) -> str:
    """Return the name of a program, as code if it is code."""
    return f"`{program}`" if program.endswith(")") or "+" in program else program


def added_per_op(programs: Results) -> str:
    """Return nanoseconds per op of the bare program, and those that each variant adds."""
    columns = {code(name): one["ns"] for name, one in programs.items()}
    return against(columns, ".0f", "{:.0f}", 1, difference)


def shares_of_mode(programs: Results) -> str:
    """Return added time as a share of TorchFunctionMode's."""
    return grid(
        {
            code(name): {
                variant: f"{to_mode(one, variant).middle:.3f}" for variant in one["ns"] if variant != "bare"
            }
            for name, one in programs.items()
        }
    )


def shares_of_steps(steps: Results) -> str:
    """Return the percent of the model's bare step that each variant adds to the twin's."""
    return grid(
        {
            title: {"bare step": f"{bare_seconds(step) * 1e3:.0f} ms"}
            | {name: f"{share(step, name):.2f}" for name in step["twin"] if name != "bare"}
            for title, step in steps.items()
        }
    )


def added_per_node(programs: Results) -> str:
    """Return nanoseconds per backward op."""
    columns = {
        f"{name}, {one['nodes']} nodes": {
            variant: np.asarray(times) / one["nodes"] for variant, times in one["ns"].items()
        }
        for name, one in programs.items()
    }
    return against(columns, ".0f", "{:.0f}", 1, difference)


def instructions(results: Results, kind: str) -> str:
    """Return instructions per op in each state: "all", the interceptor's "own", or "shares" of the mode's."""
    cells: dict[str, Callable[[Results, str], str]] = {
        "all": lambda counts, state: f"{counts[state][0]:,.0f}",
        "own": lambda counts, state: f"{counts[state][1]:,.0f}",
        "shares": lambda counts, state: f"{more(counts, state)[0] / more(counts, MODE)[0]:.3f}",
    }
    states = STATES[2:] if kind == "shares" else STATES
    return grid(
        {
            f"`{name}`": {state: cells[kind](counts, state) for state in states if state in counts}
            for name, counts in results["programs"].items()
        }
    )


def more(counts: Results, state: str) -> Any:
    """Return the instructions of a state that are more than torch's: all, and those of each owner."""
    return np.subtract(counts[state], counts["torch alone, again"])


def routines(results: Results) -> str:
    """Return instructions that routines add, by their owners, and a fifth of the mode's for scale."""
    names = ["all", *(f"of {owner}" for owner in results["owners"])]
    columns = {}
    for program, counts in results["programs"].items():
        values = zip(names, more(counts, "before + after"), strict=True)
        columns[f"`{program}`"] = {name: f"{one:,.0f}" for name, one in values}
        columns[f"`{program}`"]["a fifth of the mode's"] = f"{more(counts, MODE)[0] / 5:,.0f}"
    return grid(columns)
