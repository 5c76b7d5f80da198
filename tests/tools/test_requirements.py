"""Undocumented names of frameworks that tools lean on are listed, and what is missing is named."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import amanda.tools
from amanda.errors import ToolError
from amanda.tools.kit import RequiredNames
from amanda.tools.remat import RematTool

TOOLS = [Path(folder) for folder in amanda.tools.__path__]
HOMES = (*TOOLS, Path(amanda.__file__).parent)
PYTHONS = {"_asdict", "_fields", "_getframe"}
INSTANCES = {"_buffers", "_graph_namespace", "_id", "_ragged_idx", "_reversed_padding_repeated_twice"}
"""Names that instances get as they are made, which no class holds."""
OPTIONAL = {"_descriptor", "_hf_hook"}
"""Names that are asked for where they may be absent."""


def sources() -> list[tuple[Path, Path]]:
    """Folder and file of each module of a tool, in whichever distribution."""
    return [(folder, path) for folder in TOOLS for path in sorted(folder.rglob("*.py"))]


def required_names() -> list[RequiredNames]:
    """The names that modules of tools state, of modules that state any."""
    stated: list[RequiredNames] = []
    for folder, path in sources():
        if "RequiredNames(" in path.read_text():
            module = import_module("amanda.tools." + ".".join(path.relative_to(folder).with_suffix("").parts))
            stated += [value for value in vars(module).values() if isinstance(value, RequiredNames)]
    return stated


REQUIRED = required_names()


def own_names() -> set[str]:
    """Every name that Amanda's own sources define."""
    found: set[str] = set()
    for path in (path for home in HOMES for path in home.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def undocumented(path: Path) -> Iterator[str]:
    """Names with an underscore that a source reads, and what it imports from the insides of frameworks."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module:
            root, *parts = node.module.split(".")
            names = [one.name for one in node.names]
            inside = any(one in ("python", "src") or one.startswith("_") for one in parts)
            if root in ("torch", "tensorflow", "keras", "tf_keras", "jax"):
                yield from (one for one in names if inside or one.startswith("_"))


def test_every_undocumented_name_that_a_tool_reads_is_in_the_table() -> None:
    known = {part for one in REQUIRED for name in one.names for part in name.replace(":", ".").split(".")}
    allowed = known | own_names() | PYTHONS | OPTIONAL | INSTANCES
    read = {(path.parent.name, name) for _, path in sources() for name in undocumented(path)}
    assert {one for one in read if one[1] not in allowed} == set()


@pytest.mark.parametrize(
    "required",
    [one for one in REQUIRED if one.framework not in ("jax", "mindspore")],
    ids=lambda one: f"{one.tool} {one.framework}",
)
def test_the_frameworks_here_have_what_tools_lean_on(required: RequiredNames) -> None:
    RequiredNames(required.tool, required.framework, *required.names).check()


def test_a_tool_of_another_distribution_states_its_own_names() -> None:
    required = RequiredNames("amanda.tools.elsewhere", "torch", "torch:nn.Module", "torch:_C._no_such_name")
    with pytest.raises(ToolError, match=r"lacks torch\._C\._no_such_name, which amanda\.tools\.elsewhere"):
        required.check()


def test_a_tool_names_what_a_framework_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    (required,) = [one for one in REQUIRED if one.tool == "amanda.tools.remat"]
    monkeypatch.setattr(required, "_is_complete", False)
    x = torch.ones(2, requires_grad=True)
    lacking = r"torch .* lacks torch\._C\._is_any_autocast_enabled, which .*remat leans on"
    with pytest.raises(ToolError, match=lacking), amanda.apply(RematTool()):
        (x * 2).sum()
    monkeypatch.undo()
    with amanda.apply(RematTool()):
        (x * 2).sum().backward()
    assert x.grad is not None
