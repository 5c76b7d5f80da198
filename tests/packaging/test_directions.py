"""Arrows point one way: tools -> core <- drivers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import amanda.backend

PACKAGES = Path(__file__).parents[2] / "packages"
FRAMEWORKS = {
    "torch",
    "torchvision",
    "tensorflow",
    "keras",
    "jax",
    "flax",
    "mindspore",
    "transformers",
    "onnxruntime",
}
OWN = {
    "amanda-driver-torch": {"torch"},
    "amanda-driver-tf": {"tensorflow", "keras"},
    "amanda-driver-onnxruntime": {"onnxruntime"},
    "amanda-driver-mindspore": {"mindspore"},
}


def modules(distribution: str) -> list[Path]:
    found = sorted((PACKAGES / distribution / "src").rglob("*.py"))
    assert found
    return found


def imports(tree: ast.AST, in_functions: bool = True) -> Iterator[str]:
    """Full names of what is imported; those for type checkers alone do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif in_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(node, in_functions)


def test_the_scan_sees_what_it_should() -> None:
    tree = ast.parse(
        "import a.b\nfrom c import d\nfrom . import e\nif TYPE_CHECKING:\n    import f\n"
        "def g():\n    import h\nclass I:\n    import j"
    )
    assert list(imports(tree)) == ["a.b", "c.d", "h", "j"]
    assert list(imports(tree, in_functions=False)) == ["a.b", "c.d", "j"]


def belongs(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def offences(distribution: str, forbidden: set[str], in_functions: bool = True) -> list[str]:
    return [
        f"{module.relative_to(PACKAGES)} imports {name}"
        for module in modules(distribution)
        for name in imports(ast.parse(module.read_text()), in_functions)
        if any(belongs(name, package) for package in forbidden)
    ]


def test_the_core_imports_no_framework_no_driver_and_no_tool() -> None:
    assert offences("amanda-core", {*FRAMEWORKS, "amanda.drivers", "amanda.tools"}) == []


@pytest.mark.parametrize("distribution", sorted(OWN))
def test_a_driver_imports_the_core_and_its_own_framework(distribution: str) -> None:
    drivers = {path.name for path in PACKAGES.glob("*/src/amanda/drivers/*")}
    own = {path.name for path in (PACKAGES / distribution).glob("src/amanda/drivers/*")}
    others = {f"amanda.drivers.{name}" for name in drivers - own}
    assert len(others) == len(drivers) - 1
    assert offences(distribution, {*FRAMEWORKS - OWN[distribution], *others, "amanda.tools"}) == []


@pytest.mark.parametrize("distribution", [*sorted(OWN), "amanda-tools"])
def test_rooms_of_the_core_are_its_own(distribution: str) -> None:
    assert [one for one in from_the_core(distribution) if not is_offered(one)] == []


def test_every_name_of_the_driver_interface_is_used_by_a_driver_and_explained() -> None:
    used = {name for distribution in OWN for name in from_the_core(distribution)}
    pages = ("writing-a-driver.md", "writing-a-graph-driver.md")
    page = "".join((PACKAGES.parent / "docs" / name).read_text() for name in pages)
    for name in amanda.backend.__all__:
        assert f"amanda.backend.{name}" in used, f"no driver uses amanda.backend.{name}"
        assert re.search(rf"`{name}\b", page), f"no page explains `{name}`"


def is_offered(name: str) -> bool:
    """Whether a name is one of the core's public modules', not of its rooms'."""
    offered = (
        "action",
        "backend",
        "context",
        "errors",
        "interceptor",
        "namespace",
        "plugins",
        "tool",
        "testing",
    )
    modules = {f"amanda.{module}" for module in offered}
    module, _, last = name.rpartition(".")
    return not last.startswith("_") and module in {"amanda", *modules}


def from_the_core(distribution: str) -> set[str]:
    """What a driver imports of the core, for type checkers too."""
    nodes = [node for module in modules(distribution) for node in ast.walk(ast.parse(module.read_text()))]
    found = {
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.level == 0
        for alias in node.names
    }
    others = ("amanda.drivers", "amanda.tools")
    return {
        name for name in found if belongs(name, "amanda") and not any(belongs(name, one) for one in others)
    }


def test_tools_import_frameworks_inside_functions_only() -> None:
    assert offences("amanda-tools", FRAMEWORKS, in_functions=False) == []
    assert offences("amanda-tools", {"amanda.drivers"}) == []
