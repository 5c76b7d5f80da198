"""Interleaved timing of variants of one program, with a null control."""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import amanda

Variant = Callable[[], AbstractContextManager[Any]]


class EmptyTool(amanda.Tool):
    """Looks at every op and inserts nothing."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: None)


class BeforeAfterTool(amanda.Tool):
    """A Python routine before and after every op, which change nothing."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)

    def routine(self, *values: Any) -> None:
        return None


class EmptyBackwardTool(amanda.Tool):
    """Looks at every op and every backward op and inserts nothing."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: None)
        self.add_inst_for_op(lambda context: None, backward=True)


def interleaved(
    variants: dict[str, Variant], program: Callable[[], object], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each run of the program under each variant, one run of each a round."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-warmup, rounds):
        for name, variant in variants.items():
            with variant():
                start = time.perf_counter()
                program()
                took = time.perf_counter() - start
            if turn >= 0:
                seconds[name].append(took)
    return seconds


def ratio_interval(values: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median of the paired ratios, and the interval between their quartiles."""
    ratios = sorted(value / beside for value, beside in zip(values, base, strict=True))
    low, _, high = statistics.quantiles(ratios, n=4)
    return statistics.median(ratios), low, high


def arguments(description: str) -> argparse.Namespace:
    """`--quick` for one short run, `--json FILE` for the figures."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds and small models: does it run?")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch computes with")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "interceptor": "native" if amanda.interceptor.NATIVE else "pure Python",
        "torch threads": str(torch.get_num_threads()),
    }


def declare_vision_ops() -> torch.library.Library:
    """Declare what torchvision registers for at import and a build of torch without it lacks."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def publish(title: str, columns: list[str], rows: list[list[str]], options: argparse.Namespace) -> None:
    """Show figures as a table, and write them down where asked to."""
    table = Table(title=title, caption=", ".join(f"{key} {value}" for key, value in machine().items()))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else []
        known.append({"title": title, "columns": columns, "rows": rows, **machine()})
        options.json.write_text(json.dumps(known, indent=1))
    sys.stdout.flush()
