"""The gaps that each driver's conformance suite declares, read from its source: no framework is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "packages/amanda-core/src/amanda/testing/_suite"
MARKER = "<!-- gaps of the conformance suites -->"
KINDS = {"never": "never", "notyet": "not yet", "notimpl": "not implemented"}


class Suite(NamedTuple):
    """A subclass of DriverTests: what its docstring says that it is of, and the reason for each gap."""

    title: str
    gaps: dict[str, str]


def suites() -> list[Suite]:
    """The conformance suite of each mode, in the order of the drivers' tests."""
    paths = sorted(ROOT.glob("packages/*/tests/**/test_*.py"), key=lambda path: (path.parts, path.name))
    texts = ((path, path.read_text()) for path in paths if "amanda-core" not in path.parts)
    return [suite for path, text in texts if "DriverTests)" in text for suite in _suites_of(ast.parse(text))]


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
    constants = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in module.body:
        if isinstance(node, ast.ClassDef) and any(_name(base) == "DriverTests" for base in node.bases):
            title = (ast.get_docstring(node) or node.name).partition("\n")[0].removeprefix("The suite on ")
            yield Suite(title.rstrip("."), dict(_gaps_of(node, constants)))


def _gaps_of(suite: ast.ClassDef, constants: dict[str, ast.expr]) -> Iterator[tuple[str, str]]:
    for node in suite.body:
        if isinstance(node, ast.AnnAssign) and _name(node.target) == "gaps":
            yield from _entries(node.value, constants)
        if isinstance(node, ast.FunctionDef):
            for mark in (one for decorator in node.decorator_list for one in ast.walk(decorator)):
                if isinstance(mark, ast.Call) and _name(mark.func) in KINDS:
                    yield node.name, _reason(mark)


def _entries(gaps: ast.expr | None, constants: dict[str, ast.expr]) -> Iterator[tuple[str, str]]:
    """Test and reason of each entry of a dict, or of the first of two between which a condition chooses.

    Raises ValueError for what is neither.
    """
    if isinstance(gaps, ast.Name) and gaps.id in constants:
        gaps = constants[gaps.id]
    if isinstance(gaps, ast.IfExp):
        gaps = gaps.body
    if not isinstance(gaps, ast.Dict):
        text = "nothing" if gaps is None else ast.unparse(gaps)
        raise ValueError(f"gaps of a conformance suite are a dict written out, not {text}")
    for name, mark in zip(gaps.keys, gaps.values, strict=True):
        if name is None:
            yield from _entries(mark, constants)
        else:
            yield ast.literal_eval(name), _reason(constants[mark.id] if isinstance(mark, ast.Name) else mark)


def _reason(mark: ast.expr) -> str:
    """What a mark of `amanda.testing`, or pytest's own, gives as its reason."""
    if not isinstance(mark, ast.Call):
        raise ValueError(f"the mark of a gap is a call of never, notyet or notimpl, not {ast.unparse(mark)}")
    kind = KINDS.get(_name(mark.func))
    given = mark.args[0] if kind else next(one.value for one in mark.keywords if one.arg == "reason")
    text = str(ast.literal_eval(given))
    return f"{kind}: {text}" if kind else text


def _name(node: ast.expr) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))
