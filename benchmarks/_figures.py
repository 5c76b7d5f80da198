"""The figures that Amanda is to reach, beside what was measured."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from _estimates import Estimate, difference, median, quotient, quotient_of_differences
from scipy.stats import spearmanr

Results = dict[str, Any]
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
"""Variants of a step: a description, and the variants that call the same routines without Amanda."""
SMALL = ("RegNetY", "BERT", "20 linear layers")
GOALS: dict[str, tuple[float, float, float]] = {
    "flops": (1.06, 1.08, 1.2),
    "nan": (1.2, 1.2, 1.5),
    "profile": (1.2, 1.2, 1.6),
    "trace": (1.3, 1.3, 2.0),
    "stats": (1.6, 1.6, 2.0),
    "prune": (1.0, 1.0, 1.0),
    "quantize": (0.9, 0.9, 0.9),
}
FIRST_STEP = (3.0, 3.0, 8.0)
"""Steps under a tool over bare ones, in the models of SMALL."""
BESIDE = {
    "prune": ("parametrize", "torch.nn.utils.parametrize"),
    "quantize": ("FakeQuantize", "torch.ao FakeQuantize"),
}
"""Tools whose goal is a share of a peer's time: its name in short, and among the variants."""
PROGRAM_GOALS = (("nan", "Llama", 1.3), ("profile", "Llama", 2), ("prune", "32 of 64 experts", 1.2))
"""Tools, the beginning of a program's name, and a bound of the program over the bare one."""
FIRST_EXECUTIONS = {"an empty routine": 30, "inserts before + after": 60, "inserts at all four points": 150}
"""Microseconds."""
GRAPH_TOOLS = {"nan": 1.5, "stats": 2.5, "dump, every execution": 2.5}
VARIANTS_OF_NODES = ("before + after", "hooks by hand", "bare")
OUTSIDE = ("after import amanda", "after scopes", "after all")
GRAPH_HITS = ("looks at every op", "one native routine")
GRAPH_STEPS = {
    **dict.fromkeys(GRAPH_HITS, 1.02),
    "observer on convolutions and products": 1.15,
    "observer on every op": 1.35,
}


class Figure(NamedTuple):
    """A figure, its bound, the measured value, and whether that reaches the bound."""

    what: str
    wanted: str
    measured: str
    met: str


def figures(found: Results) -> Iterator[Figure]:
    """Yield every figure that there are measurements for."""
    for name, judge in JUDGES.items():
        if name in found and "missing" not in found[name]:
            yield from judge(found[name])


def verdict(estimate: Estimate, most: float) -> str:
    """Say whether a value is at most a bound, as far as its interval tells."""
    if estimate.high <= most:
        return "met"
    return "**not met**" if estimate.low > most else "met or not, within the noise"


def at_least(estimate: Estimate, least: float) -> str:
    """Say the same of a value that is at least a bound."""
    return verdict(Estimate(-estimate.middle, -estimate.high, -estimate.low), -least)


def met(reached: bool) -> str:
    """Say the same of a value without an interval."""
    return "met" if reached else "**not met**"


def of_ops(results: Results) -> Iterator[Figure]:
    """Judge cost per op as a share of the cost of a no-op TorchFunctionMode; the worst program tells."""
    programs = results["programs"]
    linear = [name for name in programs if name.startswith("F.linear")]
    modules = [name for name in programs if name.startswith("nn.")]
    others = [name for name in programs if name not in (*linear, *modules)]
    for what, variant, names, most in (
        ("op whose plan is empty, in a scope", "empty tool", others, 0.05),
        ("the same, functional linear", "empty tool", linear, 0.10),
        ("the same, called by a module, whose call counts", "empty tool", modules, 0.10),
        ("op with a Python before and after routine", "before + after", [*others, *linear], 0.2),
    ):
        worst, name = max((to_mode(programs[name], variant), name) for name in names)
        yield Figure(what, f"<= {most:.2f} of {MODE}'s cost", f"{worst:.3f} ({name})", verdict(worst, most))
    worst = max(added(programs[name], "before + after") for name in [*others, *linear]).times(1e-3)
    yield Figure("the same, in time", "< 10 us", worst.text(".1f", "us"), verdict(worst, 10))


def to_mode(program: Results, variant: str) -> Estimate:
    """Return the cost of a variant over that of TorchFunctionMode."""
    times = program["ns"]
    return quotient_of_differences(times[variant], times[MODE], times["bare"])


def added(program: Results, variant: str) -> Estimate:
    """Return the nanoseconds per op that a variant adds."""
    return difference(program["ns"][variant], program["ns"]["bare"])


def of_instructions(results: Results) -> Iterator[Figure]:
    """Judge instructions outside of scopes: none of the interceptor's, in the median none more."""
    programs = results["programs"].values()
    outside = [(counts, counts[state]) for counts in programs for state in OUTSIDE if state in counts]
    own = max(own for _, (_, own, *_) in outside)
    middle = float(np.median([every - counts["torch alone, again"][0] for counts, (every, *_) in outside]))
    measured = f"{own:.0f} of the interceptor's per op, {middle:+.1f} in all"
    yield Figure("outside any scope", "no instruction more", measured, met(own == 0 and round(middle) <= 0))


def of_steps(results: Results) -> Iterator[Figure]:
    """Judge the framework's part of a step; the worst of models and passes."""
    for variant, (what, routines) in AMANDA_STEPS.items():
        worst, whole, name = max(
            (share(step, variant, routines), share(step, variant), f"{model}, {title}")
            for model, found in results["models"].items()
            for title, step in found["passes"].items()
            if {variant, *routines} <= step["twin"].keys()
        )
        measured = f"{worst.text('.1f', '%')} ({name})"
        if routines:
            measured += f"; {whole.middle:.1f} % with the calls of the routines themselves"
        yield Figure(f"ResNet-50, BERT-base: {what}", "<= 1 % of the step", measured, verdict(worst, 1.0))


def share(step: Results, variant: str, less: Sequence[str] = ()) -> Estimate:
    """Return the percent of the bare step that a variant adds to the twin's step.

    less: variants whose own addition is taken off.
    """
    bare = np.asarray(step["twin"]["bare"])
    base = bare + sum(np.asarray(step["twin"][name]) - bare for name in less)
    return difference(step["twin"][variant], base).times(100 / bare_seconds(step))


def bare_seconds(step: Results) -> float:
    """Return the seconds of a bare step on all cores; on one, where other programs left no more than that."""
    return min(*step["all cores"], median(step["wide"]).middle)


def of_transforms(results: Results) -> Iterator[Figure]:
    """Judge an empty tool under function transforms over the bare program; the worst program tells."""
    for variant, what in (("empty tool", "op"), ("empty tool, backward too", "op and backward op")):
        worst, name = max(
            (quotient(times[variant], times["bare"]), name) for name, times in results["programs"].items()
        )
        yield Figure(
            f"function transforms: a tool that looks at every {what}", "<= 1.1 x",
            f"{worst.text('.2f', 'x')} ({name})", verdict(worst, 1.1),
        )  # fmt: skip


def of_backward(results: Results) -> Iterator[Figure]:
    """Judge two routines at each backward op over two hooks by hand; the worst program tells."""
    worst, name = max(
        (quotient_of_differences(*(one["ns"][variant] for variant in VARIANTS_OF_NODES)), name)
        for name, one in results["programs"].items()
    )
    what = "a Python routine before and after a backward op, of two hooks by hand"
    yield Figure(what, "<= 0.50", f"{worst:.2f} ({name})", verdict(worst, 0.5))


def of_analysis(results: Results) -> Iterator[Figure]:
    """Judge what an op's first execution takes more than later ones."""
    for name, most in FIRST_EXECUTIONS.items():
        more = difference(results["first"][name], results["later"][name]).times(1e-3 / results["ops"])
        yield Figure(
            f"first execution of an op: {name}", f"<= {most} us", more.text(".0f", "us"), verdict(more, most)
        )


def of_shapes(results: Results) -> Iterator[Figure]:
    """Judge the flops tool where shapes change, once ops are analysed."""
    for program, times in results["programs"].items():
        ratio = quotient(times["flops, third run"], times["bare"])
        yield Figure(f"flops, third run: {program}", "<= 1.1 x", ratio.text(".2f", "x"), verdict(ratio, 1.1))


def of_cache(results: Results) -> Iterator[Figure]:
    """Judge a pruning tool's step without the cache over one with it."""
    for model, passes in results["models"].items():
        for title, times in passes.items():
            gain, what = worth(times), f"pruning, cache off over on: {model}, {title}"
            yield Figure(what, "> 2 x", gain.text(".1f", "x"), at_least(gain, 2))


def worth(times: dict[str, list[float]]) -> Estimate:
    """Return steps without the cache over steps with it."""
    return quotient(times["cache off"], times["cache on"])


def of_graphs(results: Results) -> Iterator[Figure]:
    """Judge calls, steps, rewrites and the cache in sessions and functions of TensorFlow."""
    for mode, most in (("session", 200), ("function", 50)):
        for tool in GRAPH_HITS:
            more = difference(results["hits"][mode][tool], results["hits"][mode]["bare"])
            what = f"a call of a graph that was rewritten before, {mode}: {tool}"
            yield Figure(what, f"<= {most} us", more.text(".0f", "us"), verdict(more, most))
    for tool, bound in GRAPH_STEPS.items():
        worst, name = max(
            (quotient(step[tool], step["bare"]), f"{model}, {title}")
            for model, found in results["steps"].items()
            for title, step in found["passes"].items()
        )
        yield Figure(f"step: {tool}", f"<= {bound:.2f} x", f"{worst:.3f} ({name})", verdict(worst, bound))
    for model, times in results["tools"].items():
        for tool, bound in GRAPH_TOOLS.items():
            ratio = quotient(times[tool], times["bare"])
            what = f"{tool}, TensorFlow: {model}"
            yield Figure(what, f"<= {bound:g} x", ratio.text(".2f", "x"), verdict(ratio, bound))
    for mode, found in results["rewrites"].items():
        what, runs = next(iter(found.items()))
        took = median([run["seconds"] for run in runs])
        measured = f"{took.middle:.1f} s ({runs[0]['actions']:,} actions on {runs[0]['ops']:,} ops)"
        yield Figure(f"rewrite of {what}, {mode}", "<= 8 s", measured, verdict(took, 8))
    for which, models in (("graphs", "cache"), ("graphs, short steps", "short cache")):
        each = [worth(times) for passes in results.get(models, {}).values() for times in passes.values()]
        if each:
            mean = Estimate(*np.mean(each, axis=0))
            most = max(each).middle
            measured = f"{mean.text('.1f', 'x')}, {most:.1f} x at most"
            what = f"tools, cache off over on: {which}, mean"
            yield Figure(what, ">= 17.1 x", measured, at_least(mean, 17.1))


def of_memory(results: Results) -> Iterator[Figure]:
    """Judge bytes that Amanda holds in the middle of a step, and that it gathers with time."""
    for tool in next(iter(results["shares"].values())):
        worst, model = max((held(tools[tool]), model) for model, tools in results["shares"].items())
        measured = f"{worst:.2f} % ({model})"
        yield Figure(f"memory held: {tool}", "<= 1 % of the step's peak", measured, met(worst <= 1))
    each = {}
    for name, values in results["growth"].items():
        (start, first, _), (end, last, _) = values[len(values) // 10], values[-1]
        each[name] = (last - first) / (end - start)
    more = max(own - each["bare"] for name, own in each.items() if name != "bare")
    what = f"memory gathered over {results['growth']['bare'][-1][0]:,} iterations"
    yield Figure(what, "flat: less than one object (16 bytes) each", f"{more:.1f} bytes each", met(more < 16))


def held(moments: dict[str, int]) -> float:
    """Return the percent of a bare step's peak, less the bytes before the model, that Amanda holds."""
    return 100 * (moments["during"] - moments["bare"]) / (moments["peak"] - moments["start"])


def of_startup(results: Results) -> Iterator[Figure]:
    """Judge the interceptor's build."""
    slowest = max(results["builds"])
    yield Figure("building the interceptor, on two cores", "< 20 s", f"{slowest:.1f} s", met(slowest < 20))


def of_profiling(results: Results) -> Iterator[Figure]:
    """Judge whether both profilers say the same."""
    same = results["at once"]
    low, middle, high = same["quantiles"]
    measured = f"{same['within']:.1%} of {same['long']:,}; {middle:.3f} [{low:.3f}, {high:.3f}] of its times"
    what = "profile: times of ops above 100 us, within 10 % of torch.profiler's"
    yield Figure(what, ">= 95 %", measured, met(same["within"] >= 0.95))
    ranks = spearmanr(list(results["apart"].values())).statistic
    what = "profile: order of ops by their sums, rank correlation"
    yield Figure(what, ">= 0.9", f"{ranks:.3f}", met(ranks >= 0.9))


def of_peers(results: Results) -> Iterator[Figure]:
    """Judge steps and first steps under tools; each model has a goal of its own."""
    for block, steps in results["steps"].items():
        for tool in GOALS:
            peer, base = BESIDE.get(tool, ("", "bare"))
            of = f" of {peer}'s" if peer else " x"
            each = [(quotient(times[tool], times[base]), goal(tool, model)) for model, times in steps.items()]
            yield figure_of_models(f"{tool}, {block}: {short_names(steps)}", of, each)
    each = [
        (max(quotient(times["first"], times["bare"]) for times in tools.values()), goal("first step", model))
        for model, tools in results["first"].items()
    ]
    yield figure_of_models(
        f"first step, its largest of all tools: {short_names(results['first'])}", " x", each
    )
    for tool, start, most in PROGRAM_GOALS:
        for program, times in results["programs"].items():
            if program.startswith(start):
                ratio = quotient(times[tool], times["bare"])
                yield Figure(
                    f"{tool}: {program}", f"<= {most} x", ratio.text(".2f", "x"), verdict(ratio, most)
                )


def goal(tool: str, model: str) -> float:
    """Return the goal of a tool, or of a first step, in a model."""
    return {**GOALS, "first step": FIRST_STEP}[tool][
        next(place for place, name in enumerate(SMALL) if name in model)
    ]


def short_names(models: Results) -> str:
    """Return short names of models."""
    return " / ".join(name for name in SMALL if any(name in model for model in models))


def figure_of_models(what: str, unit: str, each: Sequence[tuple[Estimate, float]]) -> Figure:
    """Return a figure of several values with a bound each."""
    wanted = " / ".join(f"{most:g}" for _, most in each)
    measured = " / ".join(f"{ratio:.2f}" for ratio, _ in each)
    return Figure(
        what, f"<= {wanted}{unit}", measured, " / ".join(verdict(ratio, most) for ratio, most in each)
    )


def of_compiled(results: Results) -> Iterator[Figure]:
    """Judge the stats tool in the graphs of a compiled model."""
    for model, times in results["models"].items():
        ratio = quotient(times["stats"], times["bare"])
        yield Figure(f"stats, compiled: {model}", "<= 2 x", ratio.text(".2f", "x"), verdict(ratio, 2))


JUDGES: dict[str, Callable[[Results], Iterator[Figure]]] = {
    "peers": of_peers, "graphs": of_graphs, "compiled": of_compiled, "ops": of_ops,
    "instructions": of_instructions, "steps": of_steps, "backward": of_backward,
    "transforms": of_transforms, "analysis": of_analysis, "cache": of_cache, "shapes": of_shapes,
    "memory": of_memory, "startup": of_startup, "profiling": of_profiling,
}  # fmt: skip
