"""Sections of pages on what `benchmarks/gpu` measured, from docs/gpu.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _estimates import difference, percent
from _figures import worth
from _tables import against, grid, table

Results = dict[str, Any]
FILE = Path(__file__).parents[1] / "docs/gpu.json"
SCHEMA = 1


def stages(file: Path | None = None) -> Results:
    """Return the stages in a file, by default those of docs/; none where there is no file.

    Raises ValueError where the results have another schema.
    """
    file = file or FILE
    if not file.exists():
        return {}
    results: Results = json.loads(file.read_text())
    if (found := results.get("schema")) != SCHEMA:
        raise ValueError(f"{file} has schema {found}, pages are made from {SCHEMA}: measure again")
    return results["stages"]  # type: ignore[no-any-return]


def is_rehearsal(stages: Results) -> bool:
    """Return True if a stage ran on a processor, or was quick."""
    return any(one["device"] == "cpu" or one["quick"] for one in stages.values())


def values(stages: Results, stage: str, prefix: str = "") -> Results:
    """Return what the cases of a stage gave whose names begin so, by the rest of the name."""
    cases = stages.get(stage, {"cases": {}})["cases"]
    return {
        name.removeprefix(prefix): one["value"]
        for name, one in cases.items()
        if name.startswith(prefix) and isinstance(one.get("value"), dict)
    }


def checks(stages: Results) -> str:
    """Return a table of the stages: cases, and how many failed, were skipped or not reached."""
    rows = []
    for name, stage in stages.items():
        each = stage["cases"].values()
        failed, skipped = (sum(kind in one for one in each) for kind in ("failed", "skipped"))
        rows.append((name, len(each) - failed - skipped, failed, skipped, stage["left"], stage["took"]))
    return table(["stage", "passed", "failed", "skipped", "not reached", "seconds"], rows)


def failures(stages: Results) -> Iterator[str]:
    """Yield each case that failed, with the last line of what it says."""
    for stage, one in stages.items():
        for name, case in one["cases"].items():
            if "failed" in case:
                yield f"{stage}, {name}: {failure(case['failed'])}"


def failure(said: str) -> str:
    """Return the line of a traceback that has the exception, or the first line of what is amiss."""
    lines = said.strip().splitlines()
    plain = [one for one in lines if one and not one.startswith((" ", "[amanda]"))]
    return (plain or lines)[-1 if said.startswith("Traceback") else 0][:300]


def added_per_op(stages: Results) -> str:
    """Return nanoseconds of the processor per op, and those that each variant adds."""
    columns = {f"`{name}`": one["ns"] for name, one in values(stages, "costs", "per op: ").items()}
    return against(columns, ".0f", "{:.0f}", 1, difference)


def steps(stages: Results, stage: str, prefix: str) -> str:
    """Return bare steps, and those of each variant over them."""
    found = values(stages, stage, prefix)
    return against(
        {name: one["seconds"] for name, one in found.items() if "seconds" in one}, bare="{:.2f} ms"
    )


def kernels_of(op: Results) -> str:
    """Return the kernels of an op, those with most time first."""
    most = sorted(op["kernels"].items(), key=lambda item: -item[1][1])[:3]
    return "; ".join(f"`{name[:60]}` {runs} times, {took:.2f} ms" for name, (runs, took) in most)


def overheads(stages: Results) -> str:
    """Return percent of the bare step: all that a use case adds, then with routines that do nothing."""
    columns = {}
    for title, one in values(stages, "figures", "10, 11: ").items():
        times = one["seconds"]
        cases = [name for name in times if f"{name}, hollow" in times]
        columns[title] = {
            "bare step": f"{one['medians']['bare'] * 1e3:.1f} ms",
            "bare again": f"{percent(times['bare again'], times['bare']):.1f}",
        } | {
            name: f"{percent(times[name], times['bare']):.1f}; "
            f"Amanda {percent(times[f'{name}, hollow'], times['bare']):.1f}"
            for name in cases
        }
    return grid(columns)


def worths(stages: Results) -> str:
    """Return training steps without the cache over those with it."""
    found = values(stages, "figures", "12: ")
    return grid(
        {
            title: {name: f"{worth(times):.1f}" for name, times in one["cases"].items()}
            for title, one in found.items()
        }
    )


def footprints(stages: Results) -> str:
    """Return percent of the peak of a bare step that is held: Amanda's own, then with the use case's."""
    columns = {}
    for title, one in values(stages, "figures", "13: ").items():
        columns[title] = {"peak": f"{one['peak'] / 2**20:.0f} MiB"} | {
            name: "; ".join(f"{100 * held[part] / one['peak']:.1f}" for part in ("framework", "whole"))
            for name, held in one["cases"].items()
        }
    return grid(columns)
