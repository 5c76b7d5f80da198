"""Memory of tools that stay on: flat over steps, and bounded over models that are made and dropped."""

from __future__ import annotations

import gc
import json
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import children
import pytest
import torch
from torch import nn

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.inject import InjectTool
from amanda.tools.nan import NanTool
from amanda.tools.profile import ProfileTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool

TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "flops": FlopsTool,
    "inject": lambda: InjectTool(probability=0.01, limit=10),
    "nan": NanTool,
    "profile": lambda: ProfileTool(limit=200),
    "prune": PruneTool,
    "quantize": lambda: QuantizeTool(calibration=2),
    "stats": StatsTool,
    "trace": TraceTool,
}
ALLOWED = {
    "flops": 1_000, "inject": 1_000, "nan": 1_000, "profile": 30_000, "prune": 20_000, "quantize": 20_000,
    "stats": 8_000, "trace": 80_000,
}  # fmt: skip
"""Bytes for a model of three layers that is gone, about twice what docs/limitations.md tells."""


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


def held() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def step(model: nn.Module) -> None:
    model(torch.rand(3, 4)).sum().backward()
    model.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_a_step_leaves_nothing(name: str) -> None:
    model = network()
    with amanda.apply(TOOLS[name]()):
        for _ in range(150):
            step(model)
        before = held()
        for _ in range(500):
            step(model)
        # Weak tables are swept when they have doubled, which comes to 600 kB between two sweeps.
        assert held() - before < (700_000 if name == "trace" else 50_000)


def grown_by_models(name: str) -> list[int]:
    """Bytes by which memory grows over fifty models that are dropped, three times."""
    grown = []
    with amanda.apply(TOOLS[name]()):
        for _ in range(10):
            step(network())
        for _ in range(3):
            before = held()
            for _ in range(50):
                step(network())
            grown.append(held() - before)
    return grown


@pytest.mark.long
def test_a_model_that_was_dropped_leaves_what_the_result_tells_of_it() -> None:
    # In a process of its own: where there is much else, weak tables double, which is more than all this.
    code = """
import json, tracemalloc, test_growth
tracemalloc.start(1)
print(json.dumps({name: test_growth.grown_by_models(name) for name in test_growth.TOOLS}))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), children.PLACE])}
    grown = json.loads(children.run([sys.executable, "-c", code], check=True, env=env).stdout)
    assert not {name: found for name, found in grown.items() if min(found) >= 50 * ALLOWED[name]}


def test_a_tool_hears_of_the_end_of_the_ops_that_it_analysed_alone() -> None:
    class Listening(amanda.Tool):
        def __init__(self) -> None:
            self.analysed: set[int] = set()
            self.gone: list[int] = []
            self.add_inst_for_op(lambda context: self.analysed.add(context.get_op_id()))

        def op_gone(self, op_id: int) -> None:
            self.gone.append(op_id)

    tool = Listening()
    with amanda.apply(tool):
        step(network())
    own = set(tool.analysed)
    with amanda.apply(FlopsTool()):
        step(network())
    gc.collect()
    with amanda.apply(tool):
        step(network())
    assert tool.gone
    assert set(tool.gone) <= own
    assert len(set(tool.gone)) == len(tool.gone)


def test_models_that_were_dropped_are_counted_together() -> None:
    tool = FlopsTool()
    with amanda.apply(tool):
        for _ in range(20):
            step(network())
        places = len(tool.result.ops)
        for _ in range(20):
            step(network())
    assert len(tool.result.ops) == places
    assert tool.result.total("macs", "forward") == 40 * 3 * (4 * 8 + 8 * 2)


def test_statistics_of_models_that_were_dropped_are_merged() -> None:
    torch.manual_seed(0)
    values = torch.rand(40, 3, 4)
    tool, together = StatsTool(), StatsTool()
    with amanda.apply(tool):
        for x in values:
            nn.Sequential(nn.Identity(), nn.ReLU())(x)
    with amanda.apply(together):
        nn.Sequential(nn.Identity(), nn.ReLU())(values)
    *gone, last = [one for one in tool.result.measured if one.type == "relu"]
    (whole,) = [one for one in together.result.measured if one.type == "relu"]
    (dropped,) = gone
    assert dropped.executions + last.executions == 40
    both = dropped.merged(last)
    assert both.statistics.count == whole.statistics.count
    assert both.sketch == whole.sketch
    assert both.statistics.mean == pytest.approx(whole.statistics.mean)


def test_injections_into_models_that_were_dropped_stay_in_the_result() -> None:
    tool = InjectTool(type="linear", count=1, limit=30)
    with amanda.apply(tool):
        for _ in range(20):
            step(network())
    assert tool.result.total == tool.result.executions == 40
    assert len(tool.result.injections) == 30
