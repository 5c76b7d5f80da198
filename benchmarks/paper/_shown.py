"""The sections of the page, one for each figure."""

from collections.abc import Callable
from typing import Any

import numpy as np
from _evaluated import (
    EAGER,
    Results,
    bare_seconds,
    by_primitive,
    cases,
    framework,
    noise,
    part,
    routines,
    shares,
    whole,
    worth,
)
from _said import said
from _tables import table, with_span


def kernels(modes: Results) -> list[str]:
    """Figure 8."""
    results = modes[EAGER]
    every = sum(op["ms"] for op in results["ops"])
    rows = []
    for op in results["ops"][:SHOWN]:
        own = [f"{name} {100 * taken / op['ms']:.0f} %" for name, taken in by_primitive(op).items()]
        cells = [op["phase"], str(op["calls"]), f"{op['ms']:.2f}", f"{100 * op['ms'] / every:.1f} %"]
        rows.append([op["type"], *cells, "; ".join(own)])
    head = ["operator", "phase", "calls", "ms", "of the step", "kernels of oneDNN, of the operator's time"]
    convolutions = next(op for op in results["ops"] if op["type"] == "conv2d")
    runs = [
        [f"`{name}`", str(count), f"{taken:.2f}"] for name, (count, taken) in convolutions["kernels"].items()
    ]
    mine = sum(count for name, (count, _) in convolutions["kernels"].items() if name.startswith("conv"))
    words = f"The kernels of the forward convolutions, of which {mine} of {convolutions['calls']} run one:"
    return [
        *said("8"),
        *table(head, rows, words=True),
        *(words, ""),
        *table(["kernel", "runs", "ms"], runs),
    ]


def coverage(modes: Results) -> list[str]:
    """Figure 9."""
    results = modes[EAGER]
    rows = []
    for model, phases in results["models"].items():
        forward, backward = phases["forward"], phases["backward"]
        cells = [
            *(forward["all"], forward["hooks"], forward["all"] - forward["hooks"]),
            *(backward["all"], backward["hooks"], backward["all"] - backward["hooks"]),
            backward["accumulation"],
        ]
        rows.append([model, *map(str, cells)])
    head = ["", "forward: Amanda", "module hooks", "missed", "backward: Amanda", "module hooks", "missed",
            "of these accumulate gradients"]  # fmt: skip
    return [*said("9"), *table(head, rows), *said("9 differs")]


def overhead(results: Results) -> list[str]:
    """Figure 10."""
    lines = said("10")
    for mode, found in results.items():
        models = found["models"]
        rows = [["bare step", *(f"{bare_seconds(mode, one) * 1e3:.0f} ms" for one in models.values())]]
        rows.append(["bare again", *(with_span(noise(mode, one), ".1f") for one in models.values())])
        for case in cases(mode, found):
            rows.append([case, *(_added(mode, one, case) for one in models.values())])
        lines += [f"{mode}:", "", *table(["", *_examples(models)], rows)]
    return lines


def _added(mode: str, model: Results, case: str) -> str:
    own = with_span(framework(mode, model, case), ".2f")
    return f"{with_span(whole(mode, model, case), '.1f')}; Amanda {own}"


def _examples(models: Results) -> list[str]:
    return [f"{name}, {one['example']}" for name, one in models.items()]


def breakdown(results: Results) -> list[str]:
    """Figure 11."""
    lines = said("11")
    for mode, found in results.items():
        models = found["models"]
        rows = [[case, *(_part(mode, one, case) for one in models.values())] for case in cases(mode, found)]
        lines += [f"{mode}:", "", *table(["", *models], rows)]
    return lines


def _part(mode: str, model: Results, case: str) -> str:
    if mode != EAGER and whole(mode, model, case).low <= noise(mode, model).high:
        return "-"
    return (
        f"{100 * part(mode, model, case):.0f} ({routines(mode, model, case):.1f} % of the step is the tool's)"
    )


def cache(results: Results) -> list[str]:
    """Figure 12."""
    lines = said("12")
    for mode, found in results.items():
        models = found["models"]
        rows = [
            [case, *(with_span(worth(one, case), ".1f") for one in models.values())]
            for case in cases(mode, found)
        ]
        means = [np.mean([worth(one, case).middle for case in one["cases"]]) for one in models.values()]
        rows.append(["mean", *(f"{mean:.1f}" for mean in means)])
        lines += [f"{mode}, off over on:", "", *table(["", *_examples(models)], rows)]
    return lines


def memory(results: Results) -> list[str]:
    """Figure 13."""
    lines = said("13")
    for mode, found in results.items():
        rows = []
        for model, batches in found["models"].items():
            for batch, one in batches.items():
                mine = shares({"models": {model: {batch: one}}})
                cells = [f"{own:.1f}; {both:.1f}" for *_, own, both in mine]
                ends = [f"{one['first time'] / 2**20:.1f}", f"{one['peak'] / 2**20:.0f}"]
                rows.append([f"{model}, batch of {batch}", *cells, *ends])
        heads = [f"{case}: Amanda; with the tool" for case in one["cases"]]
        lines += [f"{mode}, percent of the peak:", "", *table(["", *heads, "once, MiB", "peak, MiB"], rows)]
    return [*lines, *said("peak")]


SHOWN = 8
"""Types of operators, of those that take most time."""
SECTIONS: dict[str, tuple[str, Callable[[Any], list[str]]]] = {
    "8": ("kernels by operator", kernels),
    "9": ("operators that are seen", coverage),
    "10": ("overhead", overhead),
    "11": ("Amanda's part of it", breakdown),
    "12": ("the cache", cache),
    "13": ("memory", memory),
}
