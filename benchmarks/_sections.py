"""The tables of the page: of each benchmark those that its section of the template shows, by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
from _estimates import difference, median, percent, quotient
from _figures import (
    MODE,
    Results,
    bare_seconds,
    bare_step,
    framework_share,
    held,
    share,
    to_mode,
    worth,
)
from _tables import against, grid, table

Tables = dict[str, Any]
STATES = (
    "torch alone", "torch alone, again", "after import amanda", "after scopes", "after all",
    "scope in another thread", "disabled in a scope", "empty tool", "before + after", "TorchFunctionMode",
    "TorchDispatchMode", "monkey-patch", "module hooks",
)  # fmt: skip
"""Rows of the tables of instructions."""


def examples(models: Results) -> list[str]:
    """Return the models with their examples."""
    return [f"{name}, {model['example']}" for name, model in models.items()]


def by_pass(models: Results) -> dict[str, list[Any]]:
    """Return the steps of all models for each pass."""
    titles = next(iter(models.values()))["passes"]
    return {title: [model["passes"][title] for model in models.values()] for title in titles}


def ops(results: Results) -> Tables:
    """Nanoseconds per op that each variant adds, and their shares of TorchFunctionMode's."""
    programs = {
        f"`{name}`" if name.endswith(")") or "+" in name else name: one
        for name, one in results["programs"].items()
    }
    shares = {
        name: {variant: f"{to_mode(one, variant).middle:.3f}" for variant in one["ns"] if variant != "bare"}
        for name, one in programs.items()
    }
    times = {name: one["ns"] for name, one in programs.items()}
    return {"added": against(times, ".0f", "{:.0f}", 1, difference), "shares": grid(shares)}


def steps(results: Results) -> Tables:
    """Shares of steps by the twin, and those of paired steps; calls that each variant sees."""
    models = results["models"]

    def cell(step: Results, name: str) -> str:
        return f"{share(step, name).middle:.2f}; {percent(step['wide'][name], step['wide']['bare']):.1f}"

    def column(step: Results) -> dict[str, str]:
        bare = {"bare step": f"{bare_seconds(step) * 1e3:.0f} ms"}
        return bare | {name: cell(step, name) for name in step["twin"] if name != "bare"}

    return {
        "passes": [
            (
                title,
                grid(dict(zip(examples(models), map(column, found), strict=True))),
                grid(dict(zip(models, (step["seen"] for step in found), strict=True))),
            )
            for title, found in by_pass(models).items()
        ]
    }


def backward(results: Results) -> Tables:
    """Nanoseconds per backward op."""
    columns = {
        f"{name}, {one['nodes']} nodes": {
            variant: np.asarray(times) / one["nodes"] for variant, times in one["ns"].items()
        }
        for name, one in results["programs"].items()
    }
    return {"added": against(columns, ".0f", "{:.0f}", 1, difference)}


def analysis(results: Results) -> Tables:
    """Microseconds of first executions and of scopes."""
    first, later, ops = results["first"], results["later"], results["ops"]
    more = {name: f"{difference(first[name], later[name]).times(1e-3 / ops):.1f}" for name in first}
    return {
        "first": grid({"us per op": more}, "analysis"),
        "kinds": f"{difference(*zip(*results['kinds'].values(), strict=True)).times(1e-3):.0f}",
        "parts": grid(
            {"share": {name: f"{100 * part:.0f} %" for name, part in results["shares"].items()}}, "part"
        ),
        "scopes": grid(
            {"us": {name: f"{median(times).times(1e-3):.1f}" for name, times in results["scopes"].items()}}
        ),
    }


def cached(models: Results) -> str:
    """Milliseconds of steps with the cache and without, and their quotient."""
    rows = (
        [
            f"{model}, {title}",
            *(f"{median(times[name]).middle * 1e3:.0f}" for name in ("bare", "cache on", "cache off")),
            f"{worth(times):.1f}",
        ]
        for model, passes in models.items()
        for title, times in passes.items()
    )
    return table(["", "bare", "cache on", "cache off", "off over on"], rows)


def graphs(results: Results) -> Tables:
    """Calls, steps, rewrites and the cache of TensorFlow's graphs."""
    models = results["steps"]
    rewrites = [
        [
            f"{what}, {mode}",
            f"{runs[0]['ops']:,}",
            f"{runs[0]['actions']:,}",
            f"{median([run['bare'] for run in runs]).middle:.2f}",
            f"{median([run['seconds'] for run in runs]):.2f}",
        ]
        for mode, found in results["rewrites"].items()
        for what, runs in found.items()
    ]
    return {
        "hits": against(results["hits"], ".0f", "{:.0f}", 1, difference),
        "steps": [
            (title, against(dict(zip(examples(models), found, strict=True))))
            for title, found in by_pass(models).items()
        ],
        "rewrites": table(["", "ops", "actions", "TensorFlow's own", "seconds"], rewrites),
        "cache": cached({**results["cache"], **results.get("short cache", {})}),
    }


def sessions(results: Results) -> Tables:
    """Runs under tools as shares of bare ones, and seconds of the first."""
    return {
        "models": [
            (
                f"{title}, {model['nodes']} nodes",
                against(model["runs"], bare="{:.1f} ms"),
                grid(
                    {
                        mode: {name: f"{seconds:.2f}" for name, seconds in first.items()}
                        for mode, first in model["first"].items()
                    }
                ),
            )
            for title, model in results["models"].items()
        ]
    }


def startup(results: Results) -> Tables:
    """Seconds of processes, of moments and of builds."""
    takes = {f"`{name}`": f"{median(times).middle:.2f} s" for name, times in results["processes"].items()}
    moments = {name: f"{median(times).times(1e3):.1f}" for name, times in results["moments"].items()}
    return {
        "processes": grid({"takes": takes}, "program"),
        "moments": grid({"ms": moments}),
        "builds": ", ".join(f"{seconds:.1f}" for seconds in results["builds"]),
    }


def memory(results: Results) -> Tables:
    """MiB that are held in the middle of a step."""
    spans = {
        "import": ("import", "after a bare step"),
        "first scope": ("first scope", "import"),
        "in a step": ("during", "bare"),
        "after it": ("after", "after a bare step"),
        "peak of the bare step": ("peak", "start"),
    }
    rows = (
        [
            f"{model}, {tool}",
            *(f"{(at[end] - at[start]) / 2**20:.1f}" for end, start in spans.values()),
            f"{held(at):.2f} %",
        ]
        for model, tools in results["shares"].items()
        for tool, at in tools.items()
    )
    return {"shares": table(["", *spans, "in a step, of the peak"], rows)}


def instructions(results: Results) -> Tables:
    """Instructions per op in each state; those of the routines by their owners, where they were counted."""
    programs = {f"`{name}`": counts for name, counts in results["programs"].items()}

    def states(cell: Callable[[Results, str], str], among: tuple[str, ...] = STATES) -> str:
        return grid(
            {
                name: {state: cell(counts, state) for state in among if state in counts}
                for name, counts in programs.items()
            }
        )

    def more(counts: Results, state: str) -> Any:
        return np.subtract(counts[state], counts["torch alone, again"])

    def owners(counts: Results) -> dict[str, str]:
        names = ["all", *(f"of {owner}" for owner in results["owners"])]
        cells = {name: f"{one:,.0f}" for name, one in zip(names, more(counts, "before + after"), strict=True)}
        return cells | {"a fifth of the mode's": f"{more(counts, MODE)[0] / 5:,.0f}"}

    found = {
        "all": states(lambda counts, state: f"{counts[state][0]:,.0f}"),
        "own": states(lambda counts, state: f"{counts[state][1]:,.0f}"),
    }
    if MODE in next(iter(programs.values())):  # a quick run counts few states
        found["shares"] = states(
            lambda counts, state: f"{more(counts, state)[0] / more(counts, MODE)[0]:.3f}", STATES[2:]
        )
        found["routines"] = grid({name: owners(counts) for name, counts in programs.items()})
    return found


def profiling(results: Results) -> Tables:
    """Sums by op of both profilers, and the cost of each."""
    sums = sorted(results["apart"].items(), key=lambda item: -item[1][1])[:20]
    seconds, bare = results["seconds"], median(results["seconds"]["bare"]).middle
    more = {name: difference(taken, seconds["bare"]) for name, taken in seconds.items() if name != "bare"}
    shares = {name: one.times(100 / bare) for name, one in more.items()}
    costs = {
        "of the step": {"bare step": f"{bare * 1e3:.1f} ms"}
        | {name: f"{one.middle:.1f} % {one.span('.1f')}" for name, one in shares.items()},
        "us per op": {name: f"{one.times(1e6 / results['ops']):.2f}" for name, one in more.items()},
    }
    return {
        "sums": table(
            [f"ms in a step, {results['example']}", "ProfileTool", "torch.profiler", "ratio"],
            (
                [name, f"{mine / 1e3:.2f}", f"{other / 1e3:.2f}", f"{mine / other:.3f}"]
                for name, (mine, other) in sums
            ),
        ),
        "costs": grid(costs),
    }


def tools(results: Results) -> Tables:
    """Shares of steps, in the routines and in the framework; steps without the cache over steps with it."""
    models = results["models"]

    def parts(step: Results, name: str) -> str:
        inside = 100 / bare_step(step) * median(step["wide"]["inside"][name]).middle
        whole = percent(step["wide"]["whole"][name], step["wide"]["whole"]["bare"]).middle
        return f"{whole:.1f}: routines {inside:.1f}, framework {framework_share(step, name):.2f}"

    def column(step: Results) -> dict[str, str]:
        bare = {"bare step": f"{bare_step(step) * 1e3:.0f} ms"}
        return bare | {name: parts(step, name) for name in step["cache"]}

    gains = {
        f"{model}, {title}": {name: f"{worth(times):.1f}" for name, times in step["cache"].items()}
        for model, one in models.items()
        for title, step in one["passes"].items()
    }
    return {
        "passes": [
            (title, grid(dict(zip(examples(models), map(column, found), strict=True))))
            for title, found in by_pass(models).items()
        ],
        "cache": grid(gains),
    }


def remat(results: Results) -> Tables:
    """Time over the bare step, peak and ops that ran again, by budget."""
    head = ["budget", "time over bare", "peak", "ops that ran again, a step"]
    return {
        "models": [
            (
                f"{name}, {model['example']}, {model['bytes'] / 1e6:.0f} MB without a budget",
                table(
                    head,
                    (
                        [
                            title,
                            f"{quotient(model['seconds'][title], model['seconds']['bare']):.2f}",
                            f"{came['peak']:.0%}",
                            f"{came['again']:.0f}",
                        ]
                        for title, came in model["came"].items()
                    ),
                ),
            )
            for name, model in results["models"].items()
        ]
    }


def compiled(results: Results) -> Tables:
    """Steps with tools in compiled graphs, over the compiled step."""
    columns = {
        f"{name}, {model['example']}, {title}": times
        for name, model in results["models"].items()
        for title, times in model["passes"].items()
    }
    return {"steps": against(columns, first="compiled step")}


def distributed(results: Results) -> Tables:
    """Time of a step over the bare one, by the wrapper of the model."""
    rows = (
        [
            name,
            f"{median(seconds['bare']).middle * 1e3:.2f}",
            *(f"{quotient(taken, seconds['bare']):.2f}" for one, taken in seconds.items() if one != "bare"),
        ]
        for name, seconds in results["seconds"].items()
    )
    variants = [one for one in next(iter(results["seconds"].values())) if one != "bare"]
    return {"steps": table(["", "bare, ms", *variants], rows)}


SECTIONS: dict[str, Callable[[Results], Tables]] = {
    "ops": ops, "steps": steps, "backward": backward, "analysis": analysis,
    "cache": lambda results: {"steps": cached(results["models"])},
    "graphs": graphs, "sessions": sessions, "startup": startup, "memory": memory,
    "instructions": instructions, "profiling": profiling, "tools": tools, "remat": remat,
    "compiled": compiled, "distributed": distributed,
}  # fmt: skip
