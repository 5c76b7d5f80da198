"""Boundaries between packages: what is private stays in its package, and what is public is little."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amanda.errors import AmandaError

PACKAGES = Path(__file__).parents[2] / "packages"

ENTRIES = {"pytest_amanda"}
"""Modules that a framework loads by name, at the top, for a package of the same distribution."""

CAUGHT_WITHIN = {"HangError", "SharedMemory"}
"""Errors with which a package ends work of its own, and which it catches."""


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


def error_classes() -> Iterator[type[AmandaError]]:
    """Yield each class of errors that is shipped and may reach users."""
    for name, tree in sources():
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        errors = {node.name for node in classes if any("Error" in ast.unparse(base) for base in node.bases)}
        if errors - CAUGHT_WITHIN:
            module = import_module(".".join(name).removesuffix(".__init__"))
            yield from (getattr(module, error) for error in sorted(errors - CAUGHT_WITHIN))


def test_every_error_is_shown_under_the_path_that_users_import_it_from() -> None:
    errors = [error for error in error_classes() if issubclass(error, AmandaError)]
    assert len(errors) > 40
    for error in errors:
        assert "._" not in error.__module__.replace(".__main__", ""), error
        assert getattr(import_module(error.__module__), error.__qualname__) is error


class _Finding(SimpleNamespace):
    """What `NotFiniteError` is about."""

    sentence = "text"


def test_every_error_is_pickled_and_copied() -> None:
    for kind in error_classes():
        subject: Any = _Finding() if kind.__name__ == "NotFiniteError" else "text"
        error = kind(subject)
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(twin) is kind
            assert (str(twin), vars(twin)) == ("text", vars(error))
