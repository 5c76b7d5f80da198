"""Reports of scopes: bounded, a line for each kind of thing, and quick to add to."""

from __future__ import annotations

import logging
import pickle
import sys
from types import ModuleType

import pytest

import amanda
from amanda.plugins import drivers
from amanda.plugins.entries import registry
from amanda.scope.report import MAX_ENTRIES, MAX_PER_GROUP, Report


def test_things_of_one_kind_and_reason_are_one_line() -> None:
    report = Report()
    for i in range(802):
        report.add(f"insert_{'before' if i % 2 else 'after'}_op(f) of op{i} (Relu)", "there is no Python")
    report.add("the state of noise", "its kernel holds it", "model.py:3")
    assert len(report) == 803
    first, second, third = str(report).splitlines()
    assert first == (
        "insert_after_op(f) of op0 (Relu), op2 (Relu), op4 (Relu) and 398 more  there is no Python"
    )
    assert second.startswith("insert_before_op(f) of op1 (Relu), op3 (Relu)")
    assert third.split("  ")[0] == "the state of noise"
    assert third.endswith("its kernel holds it  [model.py:3]")


def test_the_first_of_a_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    report = Report()
    with caplog.at_level(logging.WARNING, "amanda"):
        for _ in range(2):
            report.add("function one", "its definition is out of reach")
            report.add("function two", "its definition is out of reach")
            report.add("function two", "it is XLA's")
    assert [record.getMessage() for record in caplog.records] == [
        "function one: its definition is out of reach",
        "function two: it is XLA's",
    ]


def test_a_report_is_bounded_and_says_that_there_is_more() -> None:
    report = Report()
    for i in range(MAX_PER_GROUP + 7):
        report.add(f"function f{i}", "out of reach")
    report.add("a session", "its model is gone")
    assert len(report) == MAX_PER_GROUP + 1
    assert "function f0, f1, f2 and more than 997 others" in str(report)
    for i in range(MAX_ENTRIES):
        report.add(f"function f{i}", f"reason {i}")
    assert len(report) == MAX_ENTRIES
    assert str(report).endswith("\nand others")


def test_what_a_source_says_is_heard_once() -> None:
    class Source:
        iterations = 0

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> object:
            self.iterations += 1
            return iter([("a session", "its model is gone")])

    report, source = Report(), Source()
    for _ in range(3):
        report.add_all(source, source)  # type: ignore[arg-type]
    assert (source.iterations, len(report)) == (1, 1)


def test_what_is_forgotten_is_noted_again() -> None:
    report = Report()
    report.add("a session", "its model is gone")
    report.clear()
    assert str(report) == "everything that ran was instrumented"
    report.add("a session", "its model is gone")
    assert pickle.loads(pickle.dumps(report)) == report == [("a session", "its model is gone", "")]


def test_a_scope_without_any_driver_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entries", lambda *_, **__: [])
    with amanda.apply(amanda.Tool()) as scope:
        pass
    (entry,) = scope.report
    assert entry.what == "drivers"
    assert "no op is seen: pip install" in entry.reason


def test_a_framework_without_a_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_driver_extras", lambda: ["known", "used"])
    monkeypatch.setattr(drivers, "driven_frameworks", lambda: ["known"])
    monkeypatch.setitem(sys.modules, "known", ModuleType("known"))
    assert drivers.missing_driver_hint() == ""
    monkeypatch.setitem(sys.modules, "used", ModuleType("used"))
    assert drivers.missing_driver_hint() == (
        'no op of used is seen, for its driver is missing: pip install "amanda-core[used]"'
    )
