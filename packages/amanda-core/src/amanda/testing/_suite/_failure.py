"""Meaning 12: a tool's mistake reaches the user as itself; what is not instrumented is said."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

import amanda
from amanda.testing._sample import Sample
from amanda.testing._suite._tools import POINTS, also, notes, op_name, tool


class Mistake(Exception):
    """The error of the suite's faulty tools; it cannot be made again from its message."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Faulty(amanda.Tool):
    """Fails where it is told to."""


def _fail(*_: Any, **__: Any) -> Any:
    raise Mistake(7, reason="not enough bits")


class FailureTests:
    """Exceptions and reports."""

    def test_an_exception_of_an_analysis_reaches_the_user_as_itself(self, sample: Sample, point: int) -> None:
        backward = "backward" in POINTS[point]
        ids: list[int] = []

        def analysis(context: Any) -> None:
            ids.append(context.get_backward_op_id() if backward else context.get_op_id())
            _fail()

        name = sample.relu_backward if backward else sample.name("relu")
        failing = also(Faulty(), analysis, name, **POINTS[point])
        after = "after" if "require_outputs" in POINTS[point] else "before"
        at = f"{after}_{'backward' if backward else 'forward'}_op"
        self._check(sample, failing, name, at, ids)

    def test_an_exception_of_a_routine_reaches_the_user_as_itself(
        self, sample: Sample, insertion: str
    ) -> None:
        backward = "backward" in insertion
        ids: list[int] = []

        def analysis(context: Any) -> None:
            ids.append(context.get_backward_op_id() if backward else context.get_op_id())
            getattr(context, insertion)(_fail)

        name = sample.relu_backward if backward else sample.name("relu")
        self._check(sample, also(Faulty(), analysis, name, backward=backward), name, insertion, ids)

    @staticmethod
    def _check(sample: Sample, failing: amanda.Tool, name: str, at: str, ids: list[int]) -> None:
        inner = sample.module(lambda x: sample.relu(x))
        outer = sample.module(lambda x: inner(x))
        outer.part = inner
        x = sample.tensor([1.0], requires_grad=True)
        with amanda.apply(failing), pytest.raises(Mistake) as caught:
            sample.backward(outer(x))
        assert caught.value.code == 7
        assert str(caught.value) == "not enough bits"
        (note,) = notes(caught.value)
        assert "Faulty" in note
        assert at in note
        assert name in note
        assert f"{ids[0]:#018x}" in note
        assert "module part" in note
        assert re.search(rf"{re.escape(__file__)}:\d+", note)

    def test_what_cannot_be_instrumented_is_reported_and_logged_once(
        self, sample: Sample, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(tool(op_name)) as scope:
            for _ in range(3):
                sample.beyond()
        assert len(scope.report) == 1
        assert scope.report[0].reason
        assert scope.report[0].what in str(scope.report)
        assert [record.name for record in caplog.records] == ["amanda"]
        assert scope.report[0].reason in caplog.text

    def test_the_report_is_empty_where_everything_was_instrumented(self, sample: Sample) -> None:
        with amanda.apply(tool(op_name)) as scope:
            sample.backward(sample.model()(sample.input()))
        assert scope.report == []
        assert str(scope.report) == "everything that ran was instrumented"
