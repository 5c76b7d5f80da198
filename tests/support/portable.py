"""One network by its weights, and tools that know no framework: what they tell is the same everywhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune import PruneTool

_RNG = np.random.default_rng(0)
IMAGES = _RNG.normal(size=(4, 8, 8, 2)).astype(np.float32)
KERNEL = _RNG.normal(size=(3, 3, 2, 4)).astype(np.float32)
KERNEL_BIAS = _RNG.normal(size=4).astype(np.float32)
MATRIX = _RNG.normal(size=(64, 3)).astype(np.float32)
MATRIX_BIAS = _RNG.normal(size=3).astype(np.float32)
"""Weights of a convolution of 3 x 3 with padding, ReLU, a pooling of 2 x 2, and a layer of three classes."""

NUMBERS = json.loads(Path(__file__).with_suffix(".json").read_text())
"""What the tools tell of it, on every framework."""
_WORDS = {"linear": "product", "matmul": "product", "addmm": "product"}
_COUNTED = ("conv2d", "relu", "max_pool2d", "product")


class Count(amanda.Tool):
    """Counts executions of ops, by the words of StandardMapping."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        kind = _WORDS.get(context["type"], context["type"])
        if kind in _COUNTED:
            context.insert_before_op(self.count, inputs=[], kind=kind)

    @amanda.observer
    def count(self, kind: str) -> None:
        self.counts[kind] += 1


def measured(run: Callable[[], Any]) -> dict[str, Any]:
    """Return what counting, FLOPs and pruning tell of a run, and what it gives with masked weights."""
    count, flops, prune = Count(), FlopsTool(), PruneTool(0.5)
    with amanda.apply(count, flops, prune):
        run()
        given = np.asarray(run())
    macs: Counter[str] = Counter()
    for one in flops.result.ops:
        kind = _WORDS.get(one.type, one.type)
        macs[kind] += one.calls * (one.macs or 0) if kind in ("conv2d", "product") else 0
    return {
        "counts": dict(count.counts),
        "macs": {kind: number for kind, number in macs.items() if number},
        "zeros": sorted(weight.size - int(weight["mask"].sum()) for weight in prune.weights),
        "outputs": given.tolist(),
    }


def assert_numbers(found: dict[str, Any]) -> None:
    """Compare with the file; sums of products may end in other digits."""
    assert {key: found[key] for key in ("counts", "macs", "zeros")} == {
        key: NUMBERS[key] for key in ("counts", "macs", "zeros")
    }
    assert np.allclose(found["outputs"], NUMBERS["outputs"], rtol=1e-5, atol=1e-5)
