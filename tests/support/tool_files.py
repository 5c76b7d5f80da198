"""A file of each kind that tools write and read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import amanda
from amanda.tools.coverage import CoverageTool
from amanda.tools.diff import diff
from amanda.tools.diff._run import open_bundle
from amanda.tools.dump import Dump, DumpTool
from amanda.tools.effective_path import EffectivePath, EffectivePathTool
from amanda.tools.flops import FlopsTool
from amanda.tools.partition import Plan
from amanda.tools.profile import ProfileTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.results import load
from amanda.tools.search import SearchTool
from amanda.tools.stats import StatsResult, StatsTool
from amanda.tools.trace import TraceTool
from amanda.tools.trace import load as load_trace

X = torch.linspace(-1, 1, 32).reshape(1, 32)


def tools_after_a_run(model: nn.Module) -> dict[str, Any]:
    """Return tools that have seen a model of 32 features twice, by name."""
    tools: dict[str, Any] = {
        "flops": FlopsTool(), "coverage": CoverageTool(), "profile": ProfileTool(), "stats": StatsTool(),
        "trace": TraceTool(), "quantize": QuantizeTool(calibration=1), "path": EffectivePathTool(),
    }  # fmt: skip
    for tool in tools.values():
        with amanda.apply(tool):
            model(X), model(X)
    tools["search"] = SearchTool(["relu=relu|gelu"])
    tools["search"].prepare(model, X)
    return tools


def save_each(tools: dict[str, Any], folder: Path) -> None:
    """Save a file of each kind into a folder."""
    for name in ("flops", "coverage", "profile", "stats", "trace"):
        tools[name].result.save(folder / f"{name}.json")
    tools["path"].result.paths[0].save(folder / "path.npz")
    tools["search"].save(folder / "architecture.json")
    for suffix in (".json", ".safetensors"):
        tools["quantize"].save(folder / f"scales{suffix}")
    diff(lambda: torch.relu(X), lambda: torch.relu(X + 1), bundle=folder / "bundle.zip")
    for form in ("npz", "safetensors"):
        dump = DumpTool(folder / form, outputs="full", format=form)
        with amanda.apply(dump):
            torch.relu(X)
        assert not dump.result.failure


def read_bundle(path: Path) -> object:
    with open_bundle(path) as runs:
        return dict(runs)


def read_dump(path: Path) -> object:
    dump = Dump(path.parent)
    return [dump.array(entry) for entry in dump]


READERS: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "flops.json": lambda tools, path: load(path),
    "coverage.json": lambda tools, path: load(path),
    "profile.json": lambda tools, path: load(path),
    "stats.json": lambda tools, path: StatsResult.load(path),
    "trace.json": lambda tools, path: load_trace(path),
    "scales.json": lambda tools, path: QuantizeTool().load(path),
    "scales.safetensors": lambda tools, path: QuantizeTool().load(path),
    "path.npz": lambda tools, path: EffectivePath.load(path),
    "architecture.json": lambda tools, path: SearchTool(["relu=relu|gelu"], architecture=path),
    "bundle.zip": lambda tools, path: read_bundle(path),
    "npz/index.json": lambda tools, path: read_dump(path),
    "npz/tensors-00000.npz": lambda tools, path: read_dump(path),
    "safetensors/tensors-00000.safetensors": lambda tools, path: read_dump(path),
    "partition.json": lambda tools, path: Plan.load(path),
}
