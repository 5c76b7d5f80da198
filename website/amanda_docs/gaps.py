"""The gaps that each driver's conformance suite declares, read from its source: no framework is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "packages/amanda-core/src/amanda/testing/_suite"
MARKER = "<!-- gaps of the conformance suites -->"
KINDS = {"never": "never", "notyet": "not yet", "notimpl": "not implemented"}


class Suite(NamedTuple):
    """A subclass of DriverTests: what its docstring says that it is of, and the reason for each gap."""

    title: str
    gaps: dict[str, str]


def suites() -> list[Suite]:
    """The conformance suite of each mode: PyTorch's, then the others by their drivers' names."""
    paths = [path for path in ROOT.glob("packages/*/tests/**/test_*.py") if "amanda-core" not in path.parts]
    paths.sort(key=lambda path: ("amanda-driver-torch" not in path.parts, path))
    texts = (path.read_text() for path in paths)
    return [suite for text in texts if "DriverTests)" in text for suite in _suites_of(ast.parse(text))]


def meanings() -> dict[str, list[str]]:
    """The tests of the suite by section, which is what their class is named for."""
    found = {}
    for path in sorted(SUITE.glob("_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and (tests := list(_tests_of(node))):
                found[_words(node.name.removesuffix("Tests"))] = tests
    return found


def gaps_table() -> str:
    """A row for each meaning that some mode lacks, a column for each mode, and the reasons as notes."""
    columns = suites()
    notes: list[str] = []
    lines = [_row(["", *(suite.title for suite in columns)]), _row(["---", *("---" for _ in columns)])]
    for section, tests in meanings().items():
        passed = [len(tests) - sum(test in suite.gaps for test in tests) for suite in columns]
        lines.append(_row([f"**{section}**", *(f"{number} of {len(tests)}" for number in passed)]))
        for test in tests:
            reasons = [suite.gaps.get(test) for suite in columns]
            if any(reasons):
                lines.append(_row([_words(test), *(_cell(reason, notes) for reason in reasons)]))
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(notes, 1))])


def _cell(reason: str | None, notes: list[str]) -> str:
    if reason is None:
        return "✓"
    if reason not in notes:
        notes.append(reason)
    return f"[{notes.index(reason) + 1}]"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _words(name: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removeprefix("test_")).replace("_", " ").strip()
    return words[:1].upper() + words[1:].lower()


def _tests_of(section: ast.ClassDef) -> Iterator[str]:
    for node in section.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.name


def _suites_of(module: ast.Module) -> Iterator[Suite]:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and any(_name(base) == "DriverTests" for base in node.bases):
            title = (ast.get_docstring(node) or node.name).partition("\n")[0].removeprefix("The suite on ")
            yield Suite(title.rstrip("."), _gaps_of(node, _constants(module)))


def _constants(module: ast.Module) -> dict[str, Any]:
    """Names of a module that are made of nothing but marks and literals; marks are their reasons."""
    names: dict[str, Any] = {name: _reason_of(kind) for name, kind in KINDS.items()}
    names["pytest"] = SimpleNamespace(mark=SimpleNamespace(xfail=lambda *_, reason, **__: reason))
    names["interceptor"] = SimpleNamespace(NATIVE=True)
    for node in module.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            with suppress(Exception):  # what it is made of is not there, and no mark
                names[_name(target)] = _evaluated(node.value, names)
    return names


def _gaps_of(suite: ast.ClassDef, names: dict[str, Any]) -> dict[str, str]:
    """The reason of each gap: of the dict `gaps`, and of marks on tests that the suite overrides."""
    gaps: dict[str, str] = {}
    for node in suite.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            if _name(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]) == "gaps":
                gaps |= _evaluated(node.value, names)
        elif isinstance(node, ast.FunctionDef):
            for mark in (one for decorator in node.decorator_list for one in ast.walk(decorator)):
                if isinstance(mark, ast.Call) and _name(mark.func) in KINDS:
                    gaps[node.name] = _evaluated(mark, names)
    return gaps


def _reason_of(kind: str) -> Callable[[str], str]:
    return lambda reason: f"{kind}: {reason}"


def _evaluated(node: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), str(ROOT), "eval"), names)


def _name(node: ast.expr) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))
