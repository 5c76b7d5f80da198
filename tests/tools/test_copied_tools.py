"""Copies of tools: one that was used works and is independent of the tool, or is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import ToolError
from amanda.tools.patch import PatchTool
from amanda.tools.prune import ChannelPruneTool
from amanda.tools.quantize.weights import AWQTool, GPTQTool, NearestTool, SmoothQuantTool
from amanda.tools.select import select

X = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


MADE: dict[str, Callable[[Path], Any]] = {
    "mapping": lambda folder: amanda.load_tool("mapping", rules=[]),
    "patch": lambda folder: PatchTool("0"),
    "patch differentiable": lambda folder: PatchTool("0", differentiable=True),
    "dump": lambda folder: amanda.load_tool("dump", folder=str(folder / "dump")),
    "channels": lambda folder: ChannelPruneTool(),
    "nearest": lambda folder: NearestTool(group_size=None),
    "gptq": lambda folder: GPTQTool(group_size=None),
    "awq": lambda folder: AWQTool(group_size=None),
    "smoothquant": lambda folder: SmoothQuantTool(),
    "selected": lambda folder: select(amanda.load_tool("nan"), module="0"),
}
LISTED = [tool.name for tool in amanda.list_tools() if tool.distribution == "amanda-tools"]
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one)),
}  # fmt: skip


def use(tool: Any, model: nn.Module) -> None:
    if isinstance(tool, ChannelPruneTool):
        tool.prepare(model, X)
    with amanda.apply(tool):
        if hasattr(tool, "calibrating"):
            with tool.calibrating():
                model(X)
        else:
            model(X).sum().backward()


def shown(tool: Any) -> str:
    return str(tool.result.to_dict()) if hasattr(tool, "result") else ""


@pytest.mark.parametrize("name", [*LISTED, *(name for name in MADE if name not in LISTED)])
def test_a_copy_of_a_used_tool_is_independent_or_refused(name: str, tmp_path: Path) -> None:
    tool, model = MADE.get(name, lambda folder: amanda.load_tool(name))(tmp_path), network()
    use(tool, model)
    before = shown(tool)
    for how, copied in COPIES.items():
        try:
            twin = copied(tool)
        except ToolError:
            continue
        assert shown(twin) == before, how
        with amanda.apply(twin):
            model(X).sum().backward()
        assert shown(tool) == before, how
    if before:
        result = tool.result
        for copied in (COPIES["deepcopy"], COPIES["pickle"]):
            # A profile's notes measure the machine anew at each reading.
            assert {**copied(result).to_dict(), "notes": []} == {**result.to_dict(), "notes": []}


@pytest.mark.parametrize("name", [*LISTED, *(name for name in MADE if name not in LISTED)])
def test_a_tool_that_no_scope_had_can_be_copied(name: str, tmp_path: Path) -> None:
    tool = MADE.get(name, lambda folder: amanda.load_tool(name))(tmp_path)
    for copied in COPIES.values():
        use(copied(tool), network())


def test_the_error_of_a_copy_says_what_to_do() -> None:
    tool = amanda.load_tool("flops")
    copy.deepcopy(tool)
    use(tool, network())
    with pytest.raises(ToolError, match="copy its result, or make another FlopsTool"):
        pickle.dumps(tool)
