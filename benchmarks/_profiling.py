"""The profile tool beside torch.profiler: the section of the page."""

from typing import Any

from _estimates import difference, median
from _figures import span
from _tables import table, with_span
from _words import words


def profiling(results: dict[str, Any]) -> list[str]:
    """Sums by op, and what each profiler adds to a step."""
    sums = sorted(results["apart"].items(), key=lambda item: -item[1][1])
    rows = [
        [name, *(f"{one / 1e3:.2f}" for one in both), f"{both[0] / both[1]:.3f}"] for name, both in sums[:20]
    ]
    seconds, ops = results["seconds"], results["ops"]
    bare = median(seconds["bare"])
    costs = [["bare step", f"{bare.middle * 1e3:.1f} ms", ""]]
    for name in list(seconds)[1:]:
        more = difference(seconds[name], seconds["bare"])
        share = more.times(100 / bare.middle)
        costs.append(
            [name, f"{share.middle:.1f} % {span(share, '.1f')}", with_span(more.times(1e6 / ops), ".2f")]
        )
    return [
        "## Profiling", "",
        *words("profiling"),
        *table([f"ms in a step, {results['example']}", "ProfileTool", "torch.profiler", "ratio"], rows),
        *words("profiling cost"),
        *table(["", "of the step", "us per op"], costs),
    ]  # fmt: skip
