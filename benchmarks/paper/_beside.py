"""Statements of the paper's text about its figures, beside the measurements."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from _evaluated import EAGER, GRAPH, Results, by_case, framework, part, shares, whole, worth
from _figures import verdict

Row = tuple[str, str, str, str]
"""A statement: its subject, the paper's value, the value here, and how they compare."""


def beside(figures: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the statements of every figure that was measured, with the number of the figure."""
    for figure, compare in COMPARED.items():
        if figure in figures:
            for row in compare(figures[figure]):
                yield figure, *row


def same(is_same: Any, otherwise: str) -> str:
    """Say how values compare."""
    return "as there" if is_same else otherwise


def flat(columns: dict[str, Results]) -> list[tuple[Any, str]]:
    """Return the values of all models and use cases, with their names."""
    return [(value, f"{case}, {model}") for model, cases in columns.items() for case, value in cases.items()]


def kernels(modes: Results) -> Iterator[Row]:
    """Compare the share of convolutions."""
    ops = modes[EAGER]["ops"]
    mine = [op for op in ops if op["type"].startswith("conv2d")]
    names = {
        name.split(", ")[1].rpartition(":")[0]
        for op in mine
        for name in op["kernels"]
        if name.startswith("convolution")
    }
    share = sum(op["ms"] for op in mine) / sum(op["ms"] for op in ops)
    here = f"{100 * share:.0f} % of the step"
    yield "ResNet-50: convolutions", "dominant", here, same(share > 0.5, "less")
    here = f"direct and products: {', '.join(sorted(names))}"
    yield "algorithms of their kernels", "im2col mostly, FFT and Winograd", here, "others"


def coverage(modes: Results) -> Iterator[Row]:
    """Compare operators that hooks miss."""
    models = modes[EAGER]["models"]
    paper = {"VGG19": "none", "BERT-base": "over 100 of 327"}
    missed = {
        (model, phase): counts["all"] - counts["hooks"]
        for model, phases in models.items()
        for phase, counts in phases.items()
    }
    for model, phases in models.items():
        wanted, mine = paper.get(model, "some"), missed[model, "forward"]
        so = same(bool(mine) != (wanted == "none"), "more")
        here = f"{mine} of {phases['forward']['all']}"
        yield f"{model}: forward operators that hooks miss", wanted, here, so
    if "BERT-base" in models:
        mine = missed["BERT-base", "backward"]
        here = f"{mine} of {models['BERT-base']['backward']['all']}"
        yield "BERT-base: backward operators that hooks miss", "over 400", here, same(mine > 400, "fewer")
    kept = sum(phases["backward"]["accumulation"] for phases in models.values())
    here = f"all {kept:,}, and Amanda sees them"
    yield "accumulations of gradients that hooks miss", "all", here, "as there"


def overhead(modes: Results) -> Iterator[Row]:
    """Compare Amanda's own part, then all of it."""
    for mode, found in modes.items():
        bound = 1.0 if mode == EAGER else 7.0
        own = flat(by_case(mode, found, framework))
        worst, where = max(own)
        middle = np.median([one.middle for one, _ in own])
        here = f"{worst.text('.1f', '%')} at most ({where}), median {middle:.2f} %"
        yield f"Amanda's own overhead, {mode}", f"< {bound:.0f} %", here, verdict(worst, bound)
        every = [one.middle for one, _ in flat(by_case(mode, found, whole))]
        here = f"median {np.median(every):.1f} %, {max(every):.0f} % at most"
        yield f"all that is added, {mode}", "not said", here, ""


def breakdown(modes: Results) -> Iterator[Row]:
    """Compare Amanda's part of the heavy use cases."""
    for mode, found in modes.items():
        parts = by_case(mode, found, part).values()
        for case in ("QAT", "effective path"):
            if mine := [100 * cases[case] for cases in parts if case in cases]:
                here = f"{min(mine):.0f} to {max(mine):.0f} %"
                yield f"Amanda's part of {case}, {mode}", "negligible", here, same(max(mine) < 10, "more")


def cache(modes: Results) -> Iterator[Row]:
    """Compare the cache's worth."""
    every = {mode: flat(by_case(mode, found, worth)) for mode, found in modes.items()}
    if EAGER in every:
        low = min(gain for gain, name in every[EAGER] if name.startswith("pruning"))
        so = "as there" if low.low > 2 else "less" if low.high < 2 else "within the noise"
        here = f"{low.text('.1f', 'x')} at least"
        yield f"pruning, {EAGER}", "> 2 x", here, so
    middles = {mode: [gain.middle for gain, _ in gains] for mode, gains in every.items()}
    both = np.concatenate(list(middles.values()))
    means = ", ".join(f"{mode} {np.mean(gains):.1f} x" for mode, gains in middles.items())
    here = f"{both.mean():.1f} x ({means})"
    yield "all, mean", "17.1 x", here, same(both.mean() >= 17.1, "**less**")
    yield "all, at most", "72.6 x", f"{both.max():.1f} x", same(both.max() >= 72.6, "**less**")


def memory(modes: Results) -> Iterator[Row]:
    """Compare shares of the peak under the tracing tool."""
    for mode, found in modes.items():
        rows = [row for row in shares(found) if row[2] == "tracing"]
        for column, what in ((3, "Amanda's own"), (4, "with the tracing tool's")):
            under = sum(row[column] < 5 for row in rows)
            here = f"< 5 % in {under} of {len(rows)}, {max(row[column] for row in rows):.1f} % at most"
            so = same(under > len(rows) / 2, "**more**")
            yield f"share of the peak, {mode}, {what}", "< 5 % in most cases", here, so
        small = [row[4] for row in rows if row[0].startswith("BERT") and row[1] < 3]
        if mode == GRAPH and small:
            here = ", ".join(f"{value:.1f} %" for value in small)
            so = same(max(small) >= 10, "less")
            yield "a transformer in TensorFlow, batches of 1 and 2", "about 10 % or more", here, so


COMPARED = {"8": kernels, "9": coverage, "10": overhead, "11": breakdown, "12": cache, "13": memory}
