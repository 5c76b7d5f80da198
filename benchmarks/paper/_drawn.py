"""The plots: as those of the other benchmarks, in colours that are told apart on white and on black."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import matplotlib as mpl
from _estimates import Estimate
from _evaluated import EAGER, Results, by_case, by_primitive, framework, part, shares, whole, worth
from _plots import AMANDA, INK, OTHERS, Plot, marks, rows

MARKS = dict(zip(("VGG19", "ResNet-50", "Inception-v3", "BERT-base"), "sov^", strict=True))


def kernels(modes: Results, axes: Any) -> None:
    """Draw a bar for each type of operator: the time of its kernels, and the rest."""
    ops = modes[EAGER]["ops"][:8][::-1]
    inside = [sum(by_primitive(op).values()) for op in ops]
    rest = [max(0.0, op["ms"] - own) for op, own in zip(ops, inside, strict=True)]
    _bars(axes, (inside, AMANDA, "kernels of oneDNN"), (rest, OTHERS, "other"))
    axes.set_yticks(range(len(ops)), [op["type"] for op in ops])
    axes.set_xlabel("milliseconds of a training step")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def coverage(modes: Results, axes: Any) -> None:
    """Draw a bar for each model and phase: operators that hooks see, and those that Amanda sees beside."""
    names = list(product(modes[EAGER]["models"], ("backward", "forward")))[::-1]
    counts = [modes[EAGER]["models"][model][phase] for model, phase in names]
    hooks, rest = [one["hooks"] for one in counts], [one["all"] - one["hooks"] for one in counts]
    _bars(axes, (hooks, OTHERS, "module hooks"), (rest, AMANDA, "Amanda alone"))
    axes.set_yticks(range(len(names)), [f"{model}, {phase}" for model, phase in names])
    axes.set_xlabel("executed operators that are instrumentation points")
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _bars(axes: Any, first: tuple[list[float], str, str], second: tuple[list[float], str, str]) -> None:
    """Draw bars of two parts, from the bottom: values, colour and label of each."""
    for (values, colour, label), left in ((first, None), (second, first[0])):
        axes.barh(range(len(values)), values, left=left, color=colour, label=label)


def overhead(results: Results, axes: Any) -> None:
    """Draw a mark for each model: percent that a use case adds, and Amanda's own."""
    for panel, (mode, found) in _panels(axes, results):
        for value, colour, shift in ((whole, OTHERS, -0.15), (framework, AMANDA, 0.15)):
            columns = _middles(mode, found, value)
            names = marks(panel, columns, MARKS, lambda _, colour=colour: colour, shift)
        panel.axvline(1 if mode == EAGER else 7, color=INK, linestyle="--", linewidth=1)
        rows(panel, names, "percent of the bare step", linear_until=1)
    _legend(axes[0], results, ("Amanda's own", AMANDA), ("all that is added", OTHERS))


def breakdown(results: Results, axes: Any) -> None:
    """Draw a bar for each use case and model: Amanda's part, and the use case's."""
    for panel, (mode, found) in _panels(axes, results):
        models = by_case(mode, found, part)
        names = list(next(iter(models.values())))
        height = 0.8 / len(models)
        for i, cases in enumerate(reversed(models.values())):
            at = [row + (i - (len(models) - 1) / 2) * height for row in range(len(names))]
            own = [cases[case] for case in reversed(names)]
            panel.barh(at, own, height * 0.85, color=AMANDA)
            panel.barh(at, [1 - one for one in own], height * 0.85, left=own, color=OTHERS)
        rows(panel, names, f"of the added time; from the top {', '.join(models)}")
        panel.xaxis.label.set_fontsize(7)


def cache(results: Results, axes: Any) -> None:
    """Draw a mark for each model: a step without the cache over one with it."""
    for panel, (mode, found) in _panels(axes, results):
        names = marks(panel, _middles(mode, found, worth), MARKS, lambda _: AMANDA)
        panel.axvline(2 if mode == EAGER else 17.1, color=INK, linestyle="--", linewidth=1)
        panel.set_xscale("log")
        panel.set_xticks((1, 2, 5, 10, 20, 50, 100, 200))
        panel.set_xlim(left=1)
        rows(panel, names, "cache off over on")
        panel.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    _legend(axes[0], results)


def memory(results: Results, axes: Any) -> None:
    """Draw lines over the batch: percent of the step's peak, of the tracing tool and Amanda's own."""
    for panel, (_, found) in _panels(axes, results):
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
        panel.set_ylim(bottom=0)
    axes[0].set_ylabel("percent of the step's peak")
    axes[0].legend(frameon=False, fontsize=7)


def _panels(axes: Any, results: Results) -> Iterator[tuple[Any, tuple[str, Results]]]:
    """Yield an axes with its title for each mode; hide those that are left over."""
    for panel in axes[len(results) :]:
        panel.set_visible(False)
    for panel, (mode, found) in zip(axes, results.items(), strict=False):
        panel.set_title(mode, color=INK, fontsize=9)
        yield panel, (mode, found)


def _middles(mode: str, found: Results, value: Callable[..., Estimate]) -> dict[str, Results]:
    return by_case(mode, found, lambda *case: value(*case).middle)


def _legend(panel: Any, results: Results, *colours: tuple[str, str]) -> None:
    for model in next(iter(results.values()))["models"]:
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
