"""What the measurements come to, beside the figures that Amanda is to reach."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from _estimates import Estimate, difference, median, quotient, quotient_of_differences

MODE = "TorchFunctionMode"
AMANDA_STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "empty tool": ("a tool that looks at every op", ()),
    "empty tool, backward too": ("a tool that looks at every op and backward op", ()),
    "before + after": ("a Python routine before and after every op", ("monkey-patch",)),
    "routines at all four points, leaves apart": (
        "the same, and around every backward op that is no leaf",
        ("monkey-patch", "hooks by hand, leaves apart"),
    ),
}
"""Variants of a step: what each is, and what such routines cost that are called without Amanda."""


class Figure(NamedTuple):
    """A figure, what was measured, and whether that reaches it."""

    what: str
    wanted: str
    measured: str
    met: str


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """Every figure that there are measurements for."""
    for name, judge in {
        "ops": of_ops, "instructions": of_instructions, "steps": of_steps, "cache": of_cache,
        "graphs": of_graphs, "memory": of_memory, "startup": of_startup, "profiling": of_profiling,
        "tools": of_tools,
    }.items():  # fmt: skip
        if name in found and "missing" not in found[name]:
            yield from judge(found[name])


def verdict(estimate: Estimate, most: float) -> str:
    """Whether a value that is to be at most so much is, as far as the interval tells."""
    if estimate.high <= most:
        return "met"
    return "**not met**" if estimate.low > most else "met or not, within the noise"


def of_ops(results: dict[str, Any]) -> Iterator[Figure]:
    """Cost per op as a share of what a no-op TorchFunctionMode costs; the worst program tells."""
    programs = results["programs"]
    linear = [name for name in programs if name.startswith("F.linear")]
    modules = [name for name in programs if name.startswith("nn.")]
    others = [name for name in programs if name not in (*linear, *modules)]
    share = f"of {MODE}'s cost"
    for what, variant, names, most in (
        ("op whose plan is empty, in a scope", "empty tool", others, 0.05),
        ("the same, functional linear", "empty tool", linear, 0.10),
        ("the same, called by a module, whose call counts", "empty tool", modules, 0.10),
        ("op with a Python before and after routine", "before + after", [*others, *linear], 0.2),
    ):
        worst, name = max((to_mode(programs[name], variant), name) for name in names)
        measured = f"{ratio(worst)} ({name})"
        yield Figure(what, f"<= {most:.2f} {share}", measured, verdict(worst, most))
    worst = max(added(programs[name], "before + after") for name in [*others, *linear]).times(1e-3)
    yield Figure(
        "the same, in time", "< 10 us", f"{worst.middle:.1f} us {span(worst, '.1f')}", verdict(worst, 10)
    )


def to_mode(program: dict[str, Any], variant: str) -> Estimate:
    """What a variant adds over what TorchFunctionMode adds."""
    times = program["ns"]
    return quotient_of_differences(times[variant], times[MODE], times["bare"])


def added(program: dict[str, Any], variant: str) -> Estimate:
    """Nanoseconds per op that a variant adds."""
    return difference(program["ns"][variant], program["ns"]["bare"])


def of_instructions(results: dict[str, Any]) -> Iterator[Figure]:
    """Outside of scopes: none in the interceptor, and in the median of programs none more elsewhere."""
    more, own = [], 0.0
    for counts in results["programs"].values():
        for state in OUTSIDE:
            if state in counts:
                more.append(counts[state][0] - counts["torch alone, again"][0])
                own = max(own, counts[state][1])
    middle = median(more).middle
    met = "met" if own == 0 and round(middle) <= 0 else "**not met**"
    measured = f"{own:.0f} of the interceptor's per op, {middle:+.1f} in all"
    yield Figure("outside any scope", "no instruction more", measured, met)


OUTSIDE = ("after import amanda", "after scopes", "after all")


def of_steps(results: dict[str, Any]) -> Iterator[Figure]:
    """The framework's part of a step; the worse of ResNet-50 and BERT, and of the passes that apply."""
    for variant, (what, routines) in AMANDA_STEPS.items():
        worst, whole, name = max(
            (share(step, variant, routines), share(step, variant), f"{model}, {title}")
            for model, found in results["models"].items()
            for title, step in found["passes"].items()
            if {variant, *routines} <= step["twin"].keys() and not model.startswith("GPT")
        )
        measured = f"{worst.middle:.1f} % {span(worst, '.1f')} ({name})"
        if routines:
            measured += f"; {whole.middle:.1f} % with the calls of the routines themselves"
        yield Figure(f"ResNet-50, BERT-base: {what}", "<= 1 % of the step", measured, verdict(worst, 1.0))


def share(step: dict[str, Any], variant: str, less: Sequence[str] = ()) -> Estimate:
    """Percent that a variant adds to a step: what it adds to the twin's over the bare step.

    less: variants whose own addition is taken off.
    """
    bare = np.asarray(step["twin"]["bare"])
    base = bare + sum(np.asarray(step["twin"][name]) - bare for name in less)
    return difference(step["twin"][variant], base).times(100 / bare_seconds(step))


def bare_seconds(step: dict[str, Any]) -> float:
    """Seconds of a bare step on all cores; on one, where other programs left no more than that."""
    return min(*step["all cores"], median(step["wide"]["bare"]).middle)


def of_cache(results: dict[str, Any]) -> Iterator[Figure]:
    """A pruning tool's step without the cache over one with it."""
    for model, passes in results["models"].items():
        for title, times in passes.items():
            worth = quotient(times["cache off"], times["cache on"])
            met = "met" if worth.low >= 2 else "**not met**" if worth.high < 2 else "within the noise"
            measured = f"{worth.middle:.1f} x {span(worth, '.1f')}"
            yield Figure(f"pruning, cache off over on: {model}, {title}", "> 2 x", measured, met)


def of_graphs(results: dict[str, Any]) -> Iterator[Figure]:
    """Calls, steps, rewrites and the cache in sessions and functions of TensorFlow."""
    for mode, most in (("session", 200), ("function", 50)):
        for tool in GRAPH_HITS:
            times = results["hits"][mode]
            more = difference(times[tool], times["bare"])
            measured = f"{more.middle:.0f} us {span(more, '.0f')}"
            what = f"a call of a graph that was rewritten before, {mode}: {tool}"
            yield Figure(what, f"<= {most} us", measured, verdict(more, most))
    for tool, bound in {**dict.fromkeys(GRAPH_HITS, 1.02), **GRAPH_OBSERVERS}.items():
        ratios = [
            (quotient(step[tool], step["bare"]), f"{model}, {title}")
            for model, found in results["steps"].items()
            for title, step in found["passes"].items()
            if bound > 1.02 or "BERT" not in model
        ]
        worst, name = max(ratios)
        yield Figure(f"step: {tool}", f"<= {bound:.2f} x", f"{ratio(worst)} ({name})", verdict(worst, bound))
    for mode, found in results["rewrites"].items():
        what, runs = next(iter(found.items()))
        took = median([run["seconds"] for run in runs])
        measured = f"{took.middle:.1f} s ({runs[0]['actions']:,} actions on {runs[0]['ops']:,} ops)"
        yield Figure(f"rewrite of {what}, {mode}", "<= 8 s", measured, verdict(took, 8))
    for which, steps in (("graphs", "cache"), ("graphs, short steps", "short cache")):
        if steps in results:
            yield cache_in_graphs(which, results[steps])


GRAPH_HITS = ("looks at every op", "one native routine")
GRAPH_OBSERVERS = {"observer on convolutions and products": 1.15, "observer on every op": 1.35}


def cache_in_graphs(which: str, models: dict[str, Any]) -> Figure:
    """The mean over tasks, models, modes and passes of a step without the cache over one with it."""
    each = [
        quotient(times["cache off"], times["cache on"])
        for passes in models.values()
        for times in passes.values()
    ]
    mean = Estimate(*(sum(values) / len(values) for values in zip(*each, strict=True)))
    most = max(one.middle for one in each)
    met = "met" if mean.low >= 17.1 else "**not met**" if mean.high < 17.1 else "within the noise"
    measured = f"{mean.middle:.1f} x {span(mean, '.1f')}, {most:.1f} x at most"
    return Figure(f"tools, cache off over on: {which}, mean", ">= 17.1 x", measured, met)


def of_memory(results: dict[str, Any]) -> Iterator[Figure]:
    """What Amanda holds in the middle of a step, of the step's peak; and what it gathers with time."""
    for tool in next(iter(results["shares"].values())):
        worst, model = max((held(tools[tool]), model) for model, tools in results["shares"].items())
        met = "met" if worst <= 1 else "**not met**"
        yield Figure(f"memory held: {tool}", "<= 1 % of the step's peak", f"{worst:.2f} % ({model})", met)
    more = max(growth(results).values())
    met = "met" if more < 16 else "**not met**"
    iterations = results["growth"]["bare"][-1][0]
    wanted = "flat: less than one object (16 bytes) each"
    yield Figure(f"memory gathered over {iterations:,} iterations", wanted, f"{more:.1f} bytes each", met)


def held(moments: dict[str, int]) -> float:
    """Percent of a bare step's peak, less what the process has before the model, that Amanda holds."""
    return 100 * (moments["during"] - moments["bare"]) / (moments["peak"] - moments["start"])


def growth(results: dict[str, Any]) -> dict[str, float]:
    """Bytes that each iteration leaves, after the first tenth, less those of bare iterations."""
    each = {}
    for name, values in results["growth"].items():
        (start, first, _), (end, last, _) = values[len(values) // 10], values[-1]
        each[name] = (last - first) / (end - start)
    return {name: more - each["bare"] for name, more in each.items() if name != "bare"}


def of_startup(results: dict[str, Any]) -> Iterator[Figure]:
    """The interceptor's build."""
    slowest = max(results["builds"])
    met = "met" if slowest < 20 else "**not met**"
    yield Figure("building the interceptor, on two cores", "< 20 s", f"{slowest:.1f} s", met)


def of_profiling(results: dict[str, Any]) -> Iterator[Figure]:
    """Whether both profilers say the same."""
    same = results["at once"]
    low, middle, high = same["quantiles"]
    measured = f"{same['within']:.1%} of {same['long']:,}; {middle:.3f} [{low:.3f}, {high:.3f}] of its times"
    met = "met" if same["within"] >= 0.95 else "**not met**"
    yield Figure(
        "profile: times of ops above 100 us, within 10 % of torch.profiler's", ">= 95 %", measured, met
    )
    ranks = correlation(results["apart"])
    met = "met" if ranks >= 0.9 else "**not met**"
    yield Figure("profile: order of ops by their sums, rank correlation", ">= 0.9", f"{ranks:.3f}", met)


def of_tools(results: dict[str, Any]) -> Iterator[Figure]:
    """The framework's part, and what the cache is worth."""
    parts, worths = [], []
    for model, found in results["models"].items():
        for title, step in found["passes"].items():
            for name in step["cache"]:
                parts.append((framework_share(step, name), f"{name}: {model}, {title}"))
                worths.append(worth(step["cache"][name]).middle)
    worst, where = max(parts)
    middle = float(np.median([part.middle for part, _ in parts]))
    measured = f"{worst.middle:.1f} % {span(worst, '.1f')} ({where}); median {middle:.1f} %"
    yield Figure("the framework's part of whole tools", "<= 1 % of the step", measured, verdict(worst, 1.0))
    measured = f"{np.mean(worths):.1f} x in the mean, {max(worths):.1f} x at most"
    met = "met" if np.mean(worths) > 2 else "**not met**"
    yield Figure("whole tools, cache off over on, eager", "> 2 x", measured, met)


def framework_share(step: dict[str, Any], name: str) -> Estimate:
    """Percent of the bare step that a tool adds to the twin's step beside the time in its routines."""
    twin = step["twin"]
    outside = np.asarray(twin["whole"][name]) - np.asarray(twin["inside"][name])
    return difference(outside, twin["whole"]["bare"]).times(100 / bare_step(step))


def bare_step(step: dict[str, Any]) -> float:
    """Seconds of the model's own step."""
    return median(step["wide"]["whole"]["bare"]).middle


def worth(times: dict[str, list[float]]) -> Estimate:
    """Steps without the cache over steps with it."""
    return quotient(times["cache off"], times["cache on"])


def correlation(sums: dict[str, list[float]]) -> float:
    """Spearman's rank correlation of the two sums of each name."""
    ranks = [np.argsort(np.argsort(one)) for one in zip(*sums.values(), strict=True)]
    return float(np.corrcoef(*ranks)[0, 1])


def span(estimate: Estimate, digits: str) -> str:
    """An interval in brackets."""
    return f"[{estimate.low:{digits}}, {estimate.high:{digits}}]"


def ratio(estimate: Estimate) -> str:
    """A ratio with its interval."""
    return f"{estimate.middle:.3f} {span(estimate, '.3f')}"
