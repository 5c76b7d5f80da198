"""Measure the cost of tools that are logged every 50 steps of a training, beside the training alone.

python benchmarks/live.py [--rounds N] prints, for two models, a bare step in milliseconds and ratios of
processor time, on one thread.  The cost is that of a logged step, with the scope that opens and closes and
the numbers that are read, beyond a bare step, spread over 50 steps.  Bare and logged steps take turns;
"bare again" is the null control.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from time import process_time

import torch
from _measure import AGAIN, BARE, seconds_of
from torch import nn

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.live import LiveTool
from amanda.tools.profile import ProfileTool
from amanda.tools.stats import StatsTool

EVERY = 50
"""Steps from one log to the next, over which a logged step is spread."""


class _NoWriter:
    """A writer that writes nothing: files and services are not the tool's."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        pass


def _encoder() -> Callable[[], None]:
    """Return a training step of an encoder of 4 layers of 128."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return _training(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.rand(8, 32, 128))


def _linears() -> Callable[[], None]:
    """Return a training step of 20 linear layers of 32."""
    return _training(nn.Sequential(*(nn.Linear(32, 32) for _ in range(20))), torch.rand(16, 32))


def _training(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a training step with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


MODELS = {"encoder, 4 layers of 128": _encoder, "20 linear layers of 32": _linears}
TOOLS: Mapping[str, Callable[[], amanda.Tool]] = {
    "StatsTool()": StatsTool, "StatsTool(bins=0)": lambda: StatsTool(bins=0), "FlopsTool()": FlopsTool,
    "ProfileTool()": ProfileTool,
}  # fmt: skip


def benchmark(rounds: int = 60) -> dict[str, dict[str, float]]:
    """Return for each model milliseconds of a bare step, and the ratio of each tool."""
    torch.set_num_threads(1)
    table: dict[str, dict[str, float]] = {}
    for model, make in MODELS.items():
        torch.manual_seed(0)
        step = make()
        measured = {name: _measure(step, tool(), rounds) for name, tool in TOOLS.items()}
        bare = statistics.median(seconds for seconds, _, _ in measured.values())
        again = statistics.median(seconds for _, seconds, _ in measured.values())
        costs = {name: 1 + extra / (EVERY * bare) for name, (_, _, extra) in measured.items()}
        table[model] = {f"{BARE}, ms": 1000 * bare, AGAIN: 1 + again / (EVERY * bare), **costs}
    return table


def _measure(step: Callable[[], None], tool: amanda.Tool, rounds: int) -> tuple[float, float, float]:
    """Return medians of seconds: of a bare step, and beyond that of a further one and of a logged one."""
    live = LiveTool(tool, _NoWriter(), every=2)

    def pair() -> None:
        # The scope of the second step, which is logged, opens as the first one ends.
        step()
        step()

    bare, again, logged = list[float](), list[float](), list[float]()
    for i in range(rounds + 5):
        seconds = seconds_of(pair, process_time)
        extra = seconds_of(pair, process_time) - seconds
        with amanda.apply(live):
            extra_logged = seconds_of(pair, process_time) - seconds
        if i >= 5:  # ops have been analysed
            bare.append(seconds / 2)
            again.append(extra)
            logged.append(extra_logged)
    return statistics.median(bare), statistics.median(again), statistics.median(logged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    print(json.dumps(benchmark(parser.parse_args().rounds), indent=1))
