"""Arrows point one way: labs -> compress -> tools -> core <- drivers."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import amanda.backend
from amanda.plugins.entries import OFFERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    "amanda-driver-jax": {"jax", "flax"},
}


EXAMPLE = "../examples/autograd_driver"
"""A driver as others write one, of a functional framework with operators in Python."""
TOOLS = ("amanda-tools", "amanda-compress", "amanda-labs")
"""From the bottom up: each imports those before it."""


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


@pytest.mark.parametrize("distribution", TOOLS)
def test_rooms_of_the_core_are_its_own_for_tools(distribution: str) -> None:
    assert [name for name in from_the_core(distribution) if not is_offered(name)] == []


@pytest.mark.parametrize("distribution", sorted(OWN))
def test_a_driver_imports_the_interface_and_the_second_tier_of_rooms(distribution: str) -> None:
    others = [one for one in from_the_core(distribution) if not is_offered(one)]
    assert sorted(set(others) - second_tier()) == []


@pytest.mark.parametrize("distribution", ["amanda-driver-onnxruntime"])
def test_an_ordinary_driver_needs_no_second_tier(distribution: str) -> None:
    assert second_tier().isdisjoint(from_the_core(distribution))


def test_every_name_that_the_core_offers_to_drivers_is_used_by_one() -> None:
    used = {name for distribution in (*OWN, EXAMPLE) for name in from_the_core(distribution)}
    offered = {f"amanda.backend.{name}" for name in amanda.backend.__all__} | second_tier()
    # A driver states the number that it was written for, which this one may have left behind.
    assert sorted(offered - used) == ["amanda.backend.DRIVER_API"]


def test_the_pages_have_a_row_for_each_name_of_the_driver_interface() -> None:
    assert rows(EAGER) | rows(GRAPHS) == set(amanda.backend.__all__)
    assert rows(EAGER) & rows(GRAPHS) == {"SelfTestProgram", "OpFacts"}  # each page says who makes them there


def test_the_page_about_eager_drivers_has_all_that_one_needs() -> None:
    needed = of_the_interface("amanda-driver-mindspore") | of_the_interface("amanda-core", "_fake_driver")
    assert sorted(needed - rows(EAGER)) == []


def test_the_page_about_drivers_of_graphs_has_all_that_one_needs() -> None:
    needed = of_the_interface("amanda-driver-onnxruntime")
    needed |= of_the_interface("amanda-core", "_fake_graph_driver")
    assert sorted(needed - rows(GRAPHS) - shared()) == ["Artefact", "Inlining"]  # those of files


def test_the_page_lists_the_second_tier() -> None:
    listed = set()
    for room, names in re.findall(r"^\| `(amanda\.\w+)` \| ([^|]*) \|", EAGER.read_text(), re.MULTILINE):
        listed |= {f"{room}.{name}" for name in re.findall(r"`(\w+)`", names)}
    assert listed == second_tier()


EAGER, GRAPHS = (PACKAGES.parent / "docs" / f"writing-a-{kind}.md" for kind in ("driver", "graph-driver"))
ROOMS = ("eager", "graph", "plan", "scope", "export")


def rows(page: Path) -> set[str]:
    """Names of the driver interface that a table of a page begins a row with."""
    found = re.findall(r"^\| `(\w+)` \| \S.* \|$", page.read_text(), re.MULTILINE)
    return {*found} & set(amanda.backend.__all__)


def shared() -> set[str]:
    """Names that the page about graphs leaves to the other."""
    (line,) = re.findall(r"for drivers of every kind, .*? explains: ([^.]*)\.", GRAPHS.read_text(), re.DOTALL)
    return {*re.findall(r"`(\w+)`", line)}


def second_tier() -> set[str]:
    """Names that rooms of the core offer to drivers on purpose."""
    modules = {room: importlib.import_module(f"amanda.{room}") for room in ROOMS}
    return {f"amanda.{room}.{name}" for room in ROOMS for name in getattr(modules[room], "__all__", ())}


def of_the_interface(distribution: str, within: str = "") -> set[str]:
    """Names of `amanda.backend` that a driver imports; within: in files whose paths have this in them."""
    found = from_the_core(distribution, within)
    return {one.removeprefix("amanda.backend.") for one in found if one.startswith("amanda.backend.")}


def is_offered(name: str) -> bool:
    """Return True for a name of the core's public modules, not of its rooms."""
    offered = (
        "action",
        "backend",
        "context",
        "errors",
        "files",
        "interceptor",
        "namespace",
        "options",
        "plugins",
        "tool",
        "testing",
    )
    modules = {f"amanda.{module}" for module in offered}
    module, _, last = name.rpartition(".")
    return not last.startswith("_") and module in {"amanda", *modules}


def from_the_core(distribution: str, within: str = "") -> set[str]:
    """Return the names that a driver imports from the core, for type checkers too."""
    files = [module for module in modules(distribution) if within in str(module)]
    nodes = [node for module in files for node in ast.walk(ast.parse(module.read_text()))]
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


OF_ONE_FRAMEWORK = re.compile(r"amanda-tools/\S+/kit/_\w+_(torch|tensorflow)\.py imports ")
"""Modules of the kit that are loaded for the tensors of one framework alone, which they are named for."""


@pytest.mark.parametrize("distribution", TOOLS)
def test_tools_import_frameworks_inside_functions_only(distribution: str) -> None:
    found = offences(distribution, FRAMEWORKS, in_functions=False)
    assert [offence for offence in found if not _is_of_its_framework(offence)] == []
    assert offences(distribution, {"amanda.drivers"}) == []


def _is_of_its_framework(offence: str) -> bool:
    module = OF_ONE_FRAMEWORK.match(offence)
    return module is not None and belongs(offence[module.end() :], module[1])


def test_modules_of_one_framework_are_loaded_by_each_other_and_entry_points_alone() -> None:
    parts = {"_tensors_torch", "_elements_torch", "_tensors_tensorflow"}
    found = offences("amanda-tools", {f"amanda.tools.kit.{part}" for part in parts})
    assert [offence for offence in found if not OF_ONE_FRAMEWORK.match(offence)] == []
    assert found != []


@pytest.mark.parametrize("place", range(len(TOOLS)))
def test_a_distribution_of_tools_imports_those_below_it(place: int) -> None:
    above = {f"amanda.tools.{tool}" for other in TOOLS[place + 1 :] for tool in tools_of(other)}
    assert offences(TOOLS[place], above) == []


def tools_of(distribution: str) -> list[str]:
    """Return the packages of a distribution below amanda.tools."""
    return [path.name for path in (PACKAGES / distribution).glob("src/amanda/tools/*") if path.is_dir()]


def test_the_core_names_the_distribution_of_each_tool_and_command() -> None:
    for distribution in TOOLS:
        offer = OFFERS[distribution.removeprefix("amanda-")]
        settings = tomllib.loads((PACKAGES / distribution / "pyproject.toml").read_text())
        points = settings["project"]["entry-points"]
        assert sorted(offer.tools) == sorted(points["amanda.tools"])
        assert sorted(offer.commands) == sorted(points.get("amanda.commands", ()))
        packages = {name for name in tools_of(distribution) if not name.startswith("_")}
        assert packages <= {*offer.tools, *offer.commands, *offer.packages, "command", "pytest"}


NATIVE_FOLDERS = {
    "interception": {"interception"},
    "execution": {"interception", "execution"},
    "pytorch": {"interception", "execution", "pytorch"},
    "statistics": {"interception/base.h", "execution/observer.h", "statistics"},
}
"""What the sources of a folder of native code include; tensors.h alone includes what defines it in line."""


@pytest.mark.parametrize("folder", NATIVE_FOLDERS)
def test_native_folders_include_downwards(folder: str) -> None:
    native = PACKAGES / "amanda-core" / "src" / "amanda" / "interceptor" / "native"
    sources = sorted((native / folder).glob("*.[ch]"))
    assert sources
    offending = [
        f"{source.relative_to(native)}: {header}"
        for source in sources
        for header in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE)
        if not NATIVE_FOLDERS[folder] & {header, header.partition("/")[0]}
    ]
    seam = ["execution/tensors.h: pytorch/layout.h"] if folder == "execution" else []
    assert offending == seam
