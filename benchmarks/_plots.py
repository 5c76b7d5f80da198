"""Plots of pages: small, on no background, in colours that are told apart on white and on black."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from _figures import added, share
from _sections import PEERS, programs, ratio

INK = "#808080"
AMANDA, OTHERS = "#3b8ed8", "#d9772b"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "amanda",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": INK,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "savefig.transparent": True,
}
NOT_AMANDA = ("TorchFunctionMode", "TorchDispatchMode", "monkey-patch", "module hooks", "bare again")


def peers(results: dict[str, Any], axes: Any) -> None:
    """Draw on axes of their own for each program: the time under each tool and under its peer, over bare."""
    for axis in axes:
        axis.set_visible(False)
    for axis, (title, times) in zip(axes, programs(results).items(), strict=False):
        axis.set_visible(True)
        tools = {tool: ratio(times, tool) for tool in PEERS}
        beside = {tool: ratio(times, peer) for tool, peer in PEERS.items() if peer in times}
        names = marks(axis, {"": tools}, {}, lambda _: AMANDA, markersize=5.5)
        for height, tool in enumerate(reversed(names)):
            if tool in beside:
                ends = (tools[tool], beside[tool])
                axis.plot(ends, (height, height), color=INK, linewidth=0.8, zorder=0)
                axis.plot(ends[1], height, "o", color=OTHERS, alpha=0.8, mew=0, markersize=5.5)
        axis.axvline(1, color=INK, linewidth=0.8)
        rows(axis, names, "")
        axis.set_xscale("log")
        axis.set_xlim(0.8, 160)
        axis.set_xticks([1, 3, 10, 30, 100], labels=["1", "3", "10", "30", "100"])
        axis.xaxis.set_minor_locator(mpl.ticker.NullLocator())
        axis.set_title(title, fontsize=8, color=INK)
    axes[len(axes) // 2].set_xlabel("time over the bare program")
    for colour, label in ((AMANDA, "Amanda"), (OTHERS, "what else does the same")):
        axes[0].plot([], [], "o", color=colour, label=label, mew=0)
    axes[0].figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def ops(results: dict[str, Any], axes: Any) -> None:
    """Draw a dot for each program: nanoseconds that are added per op."""
    columns = {
        program: {name: added(one, name).middle for name in one["ns"] if name != "bare"}
        for program, one in results["programs"].items()
    }
    names = marks(axes, columns, dict.fromkeys(columns, "o"), colour_of, markersize=4.5)
    rows(axes, names, "nanoseconds added per op, a dot for each program", linear_until=100)


def steps(results: dict[str, Any], axes: Any) -> None:
    """Draw a mark for each model: percent that is added to a training step."""
    models = {name: one["passes"]["forward + backward"] for name, one in results["models"].items()}
    columns = {
        model: {name: share(step, name).middle for name in step["twin"] if not name.startswith("bare")}
        for model, step in models.items()
    }
    names = marks(axes, columns, dict(zip(models, "os", strict=True)), colour_of)
    for model, mark in zip(models, "os", strict=True):
        axes.plot([], [], mark, color=INK, label=model, mew=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8)
    axes.axvline(1, color=INK, linestyle="--", linewidth=1)
    rows(axes, names, "percent added to forward + backward; dashed: 1 %", linear_until=1)


def memory(results: dict[str, Any], axes: Any) -> None:
    """Draw lines of bytes in use."""
    for (name, values), colour in zip(results["growth"].items(), (OTHERS, AMANDA), strict=True):
        start = len(values) // 10
        base = values[start][1]
        kibibytes = [(used - base) / 1024 for _, used, _ in values[start:]]
        axes.plot([at for at, *_ in values[start:]], kibibytes, color=colour, label=name)
    axes.set_xlabel("iteration")
    axes.set_ylabel("KiB")
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]), top=max(256, axes.get_ylim()[1]))
    axes.legend(frameon=False, fontsize=8)


def colour_of(variant: str) -> str:
    """Return the colour of a variant."""
    return OTHERS if variant in NOT_AMANDA else AMANDA


def marks(
    axes: Any,
    columns: Mapping[str, Mapping[str, float]],
    shapes: Mapping[str, str],
    colour: Callable[[str], str],
    shift: float = 0.0,
    **style: Any,
) -> list[str]:
    """Draw a mark for each column and row, none below 0; return the names of rows, from the top.

    shapes: of the marks, by column.  colour: of a row.  shift: of the marks, upwards.
    """
    names = list(dict.fromkeys(name for values in columns.values() for name in values))
    heights = {name: at + shift for at, name in enumerate(reversed(names))}
    for column, values in columns.items():
        for tint in dict.fromkeys(map(colour, values)):
            chosen = {name: max(0.0, value) for name, value in values.items() if colour(name) == tint}
            at, shape = [heights[name] for name in chosen], shapes.get(column, "o")
            axes.plot(list(chosen.values()), at, shape, color=tint, alpha=0.8, mew=0, **style)
    return names


def rows(axes: Any, names: Sequence[str], label: str, linear_until: float | None = None) -> None:
    """Write names down the side, from the top; linear_until: of a scale that shows both nothing and much."""
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.tick_params(axis="y", length=0)
    if linear_until is not None:
        axes.set_xscale("symlog", linthresh=linear_until, linscale=0.6)
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel(label)


class Plot(NamedTuple):
    """A painter of results, inches, and the number of axes side by side; one is given as it is."""

    paint: Callable[[dict[str, Any], Any], None]
    size: tuple[float, float]
    panels: int = 1


PLOTS = {
    "peers": Plot(peers, (9, 2.5), 5),
    "ops": Plot(ops, (7, 3.4)),
    "steps": Plot(steps, (7, 2.9)),
    "memory": Plot(memory, (7, 2.0)),
}


def draw(found: dict[str, Any], folder: Path, plots: Mapping[str, Plot], prefix: str) -> None:
    """Write the plot of each benchmark that has one."""
    mpl.use("svg")
    from matplotlib import pyplot

    for name, plot in plots.items():
        if name in found and "missing" not in found[name]:
            with mpl.rc_context(STYLE):
                figure, axes = pyplot.subplots(
                    ncols=plot.panels, sharey=True, figsize=plot.size, layout="constrained"
                )
                plot.paint(found[name], axes)
                figure.savefig(folder / f"{prefix}-{name}.svg", metadata={"Date": None, "Creator": None})
                pyplot.close(figure)
