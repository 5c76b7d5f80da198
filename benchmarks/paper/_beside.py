"""What the text of the paper says of its figures, beside what was measured."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from _evaluated import EAGER, GRAPH, Results, cases, framework, part, shares, whole, worth
from _figures import span, verdict


class Beside(NamedTuple):
    """A statement of the paper, the same here, and how they compare."""

    figure: str
    what: str
    paper: str
    here: str
    so: str


def beside(figures: dict[str, Any]) -> Iterator[Beside]:
    """Of every figure that was measured."""
    for figure, compare in COMPARED.items():
        if figure in figures:
            for what, paper, here, so in compare(figures[figure]):
                yield Beside(figure, what, paper, here, so)


Row = tuple[str, str, str, str]


def coverage(modes: Results) -> Iterator[Row]:
    """Hooks miss."""
    results = modes[EAGER]
    paper = {"VGG19": "none", "BERT-base": "over 100 of 327"}
    for model, phases in results["models"].items():
        counts = phases["forward"]
        missed = counts["all"] - counts["hooks"]
        wanted = paper.get(model, "some")
        so = "as there" if bool(missed) != (wanted == "none") else "more"
        yield f"{model}: forward operators that hooks miss", wanted, f"{missed} of {counts['all']}", so
    for model, phases in results["models"].items():
        counts = phases["backward"]
        if model == "BERT-base":
            missed = counts["all"] - counts["hooks"]
            so = "as there" if missed > 400 else "fewer"
            here = f"{missed} of {counts['all']}"
            yield f"{model}: backward operators that hooks miss", "over 400", here, so
    kept = sum(phases["backward"]["accumulation"] for phases in results["models"].values())
    here = f"all {kept:,}, and Amanda sees them"
    yield "accumulations of gradients that hooks miss", "all", here, "as there"


def overhead(results: Results) -> Iterator[Row]:
    """Amanda's own part, then all of it."""
    for mode, found in results.items():
        bound = 1.0 if mode == EAGER else 7.0
        pairs = [(name, case) for name in found["models"] for case in cases(mode, found)]
        own = [(framework(mode, found["models"][name], case), f"{case}, {name}") for name, case in pairs]
        worst, where = max(own)
        middle = float(np.median([one.middle for one, _ in own]))
        here = f"{worst.middle:.1f} % {span(worst, '.1f')} at most ({where}), median {middle:.2f} %"
        yield f"Amanda's own overhead, {mode}", f"< {bound:.0f} %", here, verdict(worst, bound)
        every = [whole(mode, found["models"][name], case).middle for name, case in pairs]
        here = f"median {np.median(every):.1f} %, {max(every):.0f} % at most"
        yield f"all that is added, {mode}", "not said", here, ""


def breakdown(results: Results) -> Iterator[Row]:
    """Where the use case is heavy Amanda is little of it."""
    for mode, found in results.items():
        for case in ("QAT", "effective path"):
            if case in cases(mode, found):
                parts = [100 * part(mode, model, case) for model in found["models"].values()]
                here = f"{min(parts):.0f} to {max(parts):.0f} %"
                so = "as there" if max(parts) < 10 else "more"
                yield f"Amanda's part of {case}, {mode}", "negligible", here, so


def cache(results: Results) -> Iterator[Row]:
    """What the cache is worth."""
    if EAGER in results:
        low = min(worth(model, "pruning") for model in results[EAGER]["models"].values())
        so = "as there" if low.low > 2 else "less" if low.high < 2 else "within the noise"
        here = f"{low.middle:.1f} x {span(low, '.1f')} at least"
        yield f"pruning, {EAGER}", "> 2 x", here, so
    every = {
        mode: [worth(one, case).middle for one in found["models"].values() for case in one["cases"]]
        for mode, found in results.items()
    }
    both = [value for values in every.values() for value in values]
    so = "as there" if np.mean(both) >= 17.1 else "**less**"
    means = ", ".join(f"{mode} {np.mean(values):.1f} x" for mode, values in every.items())
    yield "all, mean", "17.1 x", f"{np.mean(both):.1f} x ({means})", so
    so = "as there" if max(both) >= 72.6 else "**less**"
    yield "all, at most", "72.6 x", f"{max(both):.1f} x", so


def memory(results: Results) -> Iterator[Row]:
    """Shares of the peak under the tracing tool."""
    for mode, found in results.items():
        rows = [row for row in shares(found) if row[2] == "tracing"]
        for column, what in ((3, "Amanda's own"), (4, "with the tracing tool's")):
            under = sum(row[column] < 5 for row in rows)
            so = "as there" if under > len(rows) / 2 else "**more**"
            here = f"< 5 % in {under} of {len(rows)}, {max(row[column] for row in rows):.1f} % at most"
            yield f"share of the peak, {mode}, {what}", "< 5 % in most cases", here, so
        small = [row[4] for row in rows if row[0].startswith("BERT") and row[1] < 3]
        if mode == GRAPH and small:
            here = ", ".join(f"{value:.1f} %" for value in small)
            so = "less" if max(small) < 10 else "as there"
            yield "a transformer in TensorFlow, batches of 1 and 2", "about 10 % or more", here, so


def kernels(modes: Results) -> Iterator[Row]:
    """What convolutions are."""
    ops = modes[EAGER]["ops"]
    mine = [op for op in ops if op["type"].startswith("conv2d")]
    names = {
        name.split(", ")[1].rpartition(":")[0]
        for op in mine
        for name in op["kernels"]
        if name.startswith("convolution")
    }
    part_of_it = sum(op["ms"] for op in mine) / sum(op["ms"] for op in ops)
    so = "as there" if part_of_it > 0.5 else "less"
    yield "ResNet-50: convolutions", "dominant", f"{100 * part_of_it:.0f} % of the step", so
    here = f"direct and products: {', '.join(sorted(names))}"
    yield "algorithms of their kernels", "im2col mostly, FFT and Winograd", here, "others"


COMPARED = {"8": kernels, "9": coverage, "10": overhead, "11": breakdown, "12": cache, "13": memory}
