"""The plots: as those of the other benchmarks, in colours that are told apart on white and on black."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import matplotlib as mpl
from _evaluated import EAGER, Results, by_primitive, cases, framework, part, shares, whole, worth
from _plots import AMANDA, INK, OTHERS, Plot

MARKS = dict(zip(("VGG19", "ResNet-50", "Inception-v3", "BERT-base"), "sov^", strict=True))


def kernels(modes: Results, axes: Any) -> None:
    """A bar for each type of operator: the time of its kernels, and what is left."""
    results = modes[EAGER]
    ops = results["ops"][:8][::-1]
    for row, op in enumerate(ops):
        inside = sum(by_primitive(op).values())
        axes.barh(row, inside, color=AMANDA, label=None if row else "kernels of oneDNN")
        axes.barh(row, max(0.0, op["ms"] - inside), left=inside, color=OTHERS, label=None if row else "other")
    axes.set_yticks(range(len(ops)), [op["type"] for op in ops])
    axes.set_xlabel("milliseconds of a training step")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def coverage(modes: Results, axes: Any) -> None:
    """A bar for each model and phase: what hooks see, and what Amanda sees beside."""
    results = modes[EAGER]
    rows = list(product(results["models"], ("backward", "forward")))[::-1]
    for row, (model, phase) in enumerate(rows):
        counts = results["models"][model][phase]
        axes.barh(row, counts["hooks"], color=OTHERS, label="module hooks" if not row else None)
        rest = counts["all"] - counts["hooks"]
        axes.barh(row, rest, left=counts["hooks"], color=AMANDA, label=None if row else "Amanda alone")
    axes.set_yticks(range(len(rows)), [f"{model}, {phase}" for model, phase in rows])
    axes.set_xlabel("executed operators that are instrumentation points")
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def overhead(results: Results, axes: Any) -> None:
    """A mark for each model: what a use case adds, and what of it is Amanda's own."""
    for panel, (mode, found) in _panels(axes, results):
        names = cases(mode, found)
        for row, case in enumerate(reversed(names)):
            for model, one in found["models"].items():
                for value, colour, shift in (
                    (whole(mode, one, case).middle, OTHERS, -0.15),
                    (framework(mode, one, case).middle, AMANDA, 0.15),
                ):
                    mark = MARKS.get(model, "o")
                    panel.plot(max(0.0, value), row + shift, mark, color=colour, alpha=0.8, mew=0)
        panel.axvline(1 if mode == EAGER else 7, color=INK, linestyle="--", linewidth=1)
        panel.set_xscale("symlog", linthresh=1, linscale=0.6)
        panel.set_xlim(left=0)
        _rows(panel, names, mode, "percent of the bare step")
    _legend(axes[0], next(iter(results.values())), ("Amanda's own", AMANDA), ("all that is added", OTHERS))


def breakdown(results: Results, axes: Any) -> None:
    """A bar for each use case and model: Amanda's part, and the use case's."""
    for panel, (mode, found) in _panels(axes, results):
        names, models = cases(mode, found), found["models"]
        height = 0.8 / len(models)
        for row, case in enumerate(reversed(names)):
            for i, model in enumerate(reversed(models.values())):
                own, at = part(mode, model, case), row + (i - (len(models) - 1) / 2) * height
                panel.barh(at, own, height * 0.85, color=AMANDA)
                panel.barh(at, 1 - own, height * 0.85, left=own, color=OTHERS)
        _rows(panel, names, mode, f"of the added time; from the top {', '.join(models)}")
        panel.xaxis.label.set_fontsize(7)


def cache(results: Results, axes: Any) -> None:
    """A mark for each model: a step without the cache over one with it."""
    for panel, (mode, found) in _panels(axes, results):
        names = cases(mode, found)
        for row, case in enumerate(reversed(names)):
            for model, one in found["models"].items():
                panel.plot(
                    worth(one, case).middle, row, MARKS.get(model, "o"), color=AMANDA, alpha=0.8, mew=0
                )
        panel.axvline(2 if mode == EAGER else 17.1, color=INK, linestyle="--", linewidth=1)
        panel.set_xscale("log")
        panel.set_xticks((1, 2, 5, 10, 20, 50, 100, 200))
        panel.set_xlim(left=1)
        _rows(panel, names, mode, "cache off over on")
    _legend(axes[0], next(iter(results.values())))


def memory(results: Results, axes: Any) -> None:
    """Lines over the batch: of the tracing tool's bytes and Amanda's own, in percent of the step's peak."""
    for panel, (mode, found) in _panels(axes, results):
        for model in found["models"]:
            mine = [row for row in shares(found) if (row[0], row[2]) == (model, "tracing")]
            batches = [row[1] for row in mine]
            for column, colour, words in ((3, AMANDA, "Amanda's own"), (4, OTHERS, "with the tool")):
                values = [row[column] for row in mine]
                label = f"{model}, {words}"
                panel.plot(batches, values, f"{MARKS.get(model, 'o')}-", color=colour, label=label, mew=0)
        panel.axhline(5, color=INK, linestyle="--", linewidth=1)
        panel.set_xscale("log", base=2)
        panel.set_xticks(batches, list(map(str, batches)), minor=False)
        panel.set_xlabel("batch")
        panel.set_title(mode, color=INK, fontsize=9)
        panel.set_ylim(bottom=0)
    axes[0].set_ylabel("percent of the step's peak")
    axes[0].legend(frameon=False, fontsize=7)


def _panels(axes: Any, results: Results) -> Iterator[tuple[Any, tuple[str, Results]]]:
    """An axes for each mode; those that are left over are not shown."""
    for panel in axes[len(results) :]:
        panel.set_visible(False)
    yield from zip(axes, results.items(), strict=False)


def _rows(panel: Any, names: list[str], title: str, label: str) -> None:
    panel.set_yticks(range(len(names)), list(reversed(names)))
    panel.tick_params(axis="y", length=0)
    panel.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    panel.set_title(title, color=INK, fontsize=9)
    panel.set_xlabel(label)


def _legend(panel: Any, found: Results, *colours: tuple[str, str]) -> None:
    for model in found["models"]:
        panel.plot([], [], MARKS.get(model, "o"), color=INK, label=model, mew=0)
    for label, colour in colours:
        panel.plot([], [], "D", color=colour, label=label, mew=0)
    panel.figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)


PLOTS = {
    "8": Plot(kernels, (7, 2.4)),
    "9": Plot(coverage, (7, 2.4)),
    "10": Plot(overhead, (7.5, 2.9), 2),
    "11": Plot(breakdown, (7.5, 2.9), 2),
    "12": Plot(cache, (7.5, 2.7), 2),
    "13": Plot(memory, (7.5, 2.6), 2),
}
