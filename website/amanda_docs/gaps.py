"""Capabilities and gaps that each driver's conformance suite declares, read from its source alone."""

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
TESTS = "Of the tests that it is given, each mode passes so many, but for those in the rows between:"
KINDS = {"never": "never", "notyet": "not yet", "notimpl": "not implemented"}


class Suite(NamedTuple):
    """A subclass of DriverTests: the mode in its docstring, capabilities that it lacks, and other gaps."""

    title: str
    lacks: dict[str, str]
    gaps: dict[str, str]


def suites() -> list[Suite]:
    """The conformance suite of each mode: PyTorch's, then the others by their drivers' names."""
    paths = [path for path in ROOT.glob("packages/*/tests/**/test_*.py") if "amanda-core" not in path.parts]
    paths.sort(key=lambda path: ("amanda-driver-torch" not in path.parts, path))
    texts = (path.read_text() for path in paths)
    return [suite for text in texts if "DriverTests)" in text for suite in _suites_of(ast.parse(text))]


def capabilities() -> dict[str, str]:
    """Return the capabilities of drivers that tests of the suite may need, each with its description."""
    module = ast.parse((SUITE.parent / "_ladder.py").read_text())
    (descriptions,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.AnnAssign) and _name(node.target) == "CAPABILITIES" and node.value
    )
    return dict(ast.literal_eval(descriptions))


def meanings() -> dict[str, dict[str, frozenset[str]]]:
    """Return the tests of the suite by rung of the ladder, from its foot, and what each test needs."""
    classes = {
        node.name: node
        for path in SUITE.glob("_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    # The tests of the sample show nothing of a driver.
    names = [
        name for base in reversed(classes["DriverTests"].bases) if (name := _name(base)) != "SampleTests"
    ]
    rungs = {_title(classes[name]): dict(_tests_of(classes[name])) for name in names if name in classes}
    return {**rungs, "The whole suite": dict(_tests_of(classes["DriverTests"]))}


def gaps_table() -> str:
    """Return a table of capabilities, one of what else some mode does not pass, and the reasons as notes."""
    columns = suites()
    notes: list[str] = []
    head = [_row(["", *(suite.title for suite in columns)]), _row(["---", *("---" for _ in columns)])]
    able = [
        _row([f"`{name}`: {what}", *(_cell(suite.lacks.get(name), notes) for suite in columns)])
        for name, what in capabilities().items()
    ]
    passed = []
    for section, tests in meanings().items():
        passed.append(_row([f"**{section}**", *(_passed(suite, tests) for suite in columns)]))
        for test in tests:
            reasons = [suite.gaps.get(test) for suite in columns]
            if any(reasons):
                passed.append(_row([_words(test), *(_cell(reason, notes) for reason in reasons)]))
    told = [f"{number}. {reason}" for number, reason in enumerate(notes, 1)]
    return "\n".join([*head, *able, "", TESTS, "", *head, *passed, "", *told])


def _passed(suite: Suite, tests: dict[str, frozenset[str]]) -> str:
    given = [test for test, needed in tests.items() if not needed & suite.lacks.keys()]
    return f"{sum(test not in suite.gaps for test in given)} of {len(given)}"


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


def _title(rung: ast.ClassDef) -> str:
    """Return the title of a rung, as the heading of a section."""
    (title,) = (ast.literal_eval(keyword.value) for keyword in rung.keywords if keyword.arg == "title")
    return _words(title)


def _tests_of(section: ast.ClassDef) -> Iterator[tuple[str, frozenset[str]]]:
    for node in section.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            calls = [
                one for one in node.decorator_list if isinstance(one, ast.Call) and _name(one.func) == "needs"
            ]
            yield node.name, frozenset(str(ast.literal_eval(one)) for call in calls for one in call.args)


def _suites_of(module: ast.Module) -> Iterator[Suite]:
    for node in module.body:
        if isinstance(node, ast.ClassDef) and any(_name(base) == "DriverTests" for base in node.bases):
            title = (ast.get_docstring(node) or node.name).partition("\n")[0].removeprefix("The suite on ")
            yield Suite(title.rstrip("."), _lacks_of(node), _gaps_of(node, _constants(module)))


def _lacks_of(suite: ast.ClassDef) -> dict[str, str]:
    """Return the capabilities that a suite's driver lacks, with the reasons."""
    declared = (
        node for node in suite.body if isinstance(node, ast.AnnAssign) and _name(node.target) == "lacks"
    )
    return {
        name: reason
        for node in declared
        if node.value
        for name, reason in ast.literal_eval(node.value).items()
    }


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
