"""Remove channels of models of timm: multiplications, parameters and time before and after.

    python examples/removed_channels.py [MODEL ...] [--sparsity 0.5] [--extent 224] [--rounds 15]

Weights are random. Torch-Pruning (`pip install torch-pruning`) takes part where it is installed: it removes
the same share of each group of channels, by the same importance.
"""

import argparse
import copy
import importlib.util
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from models import let_torchvision_load
from torch import Tensor, nn

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.prune import ChannelPruneTool

Removed = tuple[nn.Module, Tensor | None]


def randomized(model: nn.Module) -> nn.Module:
    """Return the model with statistics and scales that differ from channel to channel."""
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            one.running_mean.normal_()
            one.running_var.uniform_(0.5, 2)
            nn.init.normal_(one.weight, 1, 0.2)
    return model.eval()


def by_amanda(model: nn.Module, x: Tensor, sparsity: float) -> Removed:
    """Return the smaller model, and the outputs of the masked one."""
    tool = ChannelPruneTool(sparsity=sparsity)
    tool.prepare(model, x)
    with amanda.apply(tool):
        masked = model(x)
    tool.finalize(model, remove=True)
    return model, masked


def by_torch_pruning(model: nn.Module, x: Tensor, sparsity: float) -> Removed:
    """Return the smaller model; Torch-Pruning masks none."""
    import torch_pruning

    ends = [one for one in model.modules() if isinstance(one, nn.Linear) and one.out_features == 1000]
    importance = torch_pruning.importance.MagnitudeImportance(p=2)
    with torch.enable_grad():
        torch_pruning.pruner.BasePruner(
            model, x, importance=importance, pruning_ratio=sparsity, ignored_layers=ends
        ).step()
    return model, None


def whole(model: nn.Module, x: Tensor, sparsity: float) -> Removed:
    """Return the model as it is."""
    return model, None


METHODS: dict[str, Callable[[nn.Module, Tensor, float], Removed]] = {
    "whole": whole, "ChannelPruneTool": by_amanda,
}  # fmt: skip
if importlib.util.find_spec("torch_pruning"):
    METHODS["Torch-Pruning"] = by_torch_pruning


def flops(model: nn.Module, x: Tensor) -> float:
    """Return the floating-point operations of a call, two for a multiplication and an addition."""
    tool = FlopsTool()
    with amanda.apply(tool):
        model(x)
    return float(tool.result.total())


def milliseconds(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the median time of each call, made in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            found.append(1e3 * (time.perf_counter() - start))
    return [median(found[1:]) for found in times]


@torch.no_grad()
def compare(name: str, sparsity: float, extent: int, rounds: int) -> None:
    """Print the table of a model."""
    import timm

    torch.manual_seed(0)
    x = torch.randn(1, 3, extent, extent)
    model = randomized(timm.create_model(name))
    made = [method(copy.deepcopy(model), x, sparsity) for method in METHODS.values()]
    times = milliseconds([lambda one=one: one(x) for one, _ in made], rounds)
    print(f"\n| {name} | GFLOPs | million parameters | ms | outputs from masked |\n|---|---|---|---|---|")
    for method, (one, masked), took in zip(METHODS, made, times, strict=True):
        count = sum(parameter.numel() for parameter in one.parameters()) / 1e6
        error = "" if masked is None else f"{(one(x) - masked).norm() / masked.norm():.1e}"
        print(f"| {method} | {flops(one, x) / 1e9:.3f} | {count:.2f} | {took:.1f} | {error} |")


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", default=["resnet50", "regnety_002"], metavar="MODEL")
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--extent", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    let_torchvision_load()
    for name in options.models:
        compare(name, options.sparsity, options.extent, options.rounds)


if __name__ == "__main__":
    main()
