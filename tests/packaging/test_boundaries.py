"""Boundaries between packages: what is private stays in its package, and what is public is little."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"

ENTRIES = {"pytest_amanda"}
"""Modules that a framework loads by name, at the top, for a package of the same distribution."""


def sources() -> Iterator[tuple[tuple[str, ...], ast.Module]]:
    """Yield the import path of each module that is shipped, and its source."""
    for path in sorted(PACKAGES.glob("*/src/**/*.py")):
        parts = path.with_suffix("").parts
        name = parts[parts.index("src") + 1 :]
        yield name, ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[tuple[str, ...]]:
    """Yield the import path of each name of Amanda that a module imports, in functions and for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "amanda":
            yield from (tuple(f"{node.module}.{alias.name}".split(".")) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names if alias.name[:6] == "amanda")


def package_of(name: tuple[str, ...]) -> tuple[str, ...]:
    """Return the package whose modules may import each other's private names: one tool, driver or room."""
    return name[:3] if name[1:2] in (("tools",), ("drivers",)) else name[:2]


IMPORTS = [(name, other) for name, tree in sources() for other in imported(tree)]


def test_no_package_imports_a_private_name_of_another() -> None:
    reached = set()
    for name, other in IMPORTS:
        private = next((i for i, part in enumerate(other) if part[0] == "_" and part[:2] != "__"), None)
        if private is not None and name[:private] != other[:private] and name[0] not in ENTRIES:
            reached.add((".".join(name), ".".join(other)))
    assert {pair for pair in reached if package_of(tuple(pair[0].split("."))) != _package(pair[1])} == set()


def _package(path: str) -> tuple[str, ...]:
    return package_of(tuple(path.split(".")))


@pytest.mark.parametrize(("package", "most"), [("amanda.tools.kit", 25), ("amanda.tools.weights", 15)])
def test_the_kit_is_small_and_documented(package: str, most: int) -> None:
    module = import_module(package)
    assert len(module.__all__) <= most
    kinds = [getattr(module, name) for name in module.__all__]
    undocumented = [kind for kind in kinds if inspect.isroutine(kind) or inspect.isclass(kind)]
    assert [kind for kind in undocumented if not inspect.getdoc(kind)] == []
