"""Options of tools that change between scopes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import amanda
from amanda.testing import FakeDriver, attached, fake

X = fake.tensor([1.0])


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with attached(FakeDriver):
        yield


class Scale(amanda.Tool):
    """Scales what relu gives; the factor is read at analysis, the offset at execution."""

    def __init__(self, factor: float, offset: float = 0.0) -> None:
        self.factor = factor
        self.offset = offset
        self.ops = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.ops += 1
        context.insert_after_op(self.scale, factor=self.factor)

    def scale(self, value: Any, factor: float) -> Any:
        return value * factor + self.offset


def applied(tool: amanda.Tool) -> tuple[float, list[str]]:
    with amanda.apply(tool) as scope:
        value = fake.relu(X).numbers[0]
    return value, [entry.reason for entry in scope.report]


def test_an_option_that_changed_since_ops_were_analysed_is_reported_with_the_fix() -> None:
    tool = Scale(2.0)
    assert applied(tool) == (2.0, [])
    tool.factor = 3.0
    value, (told,) = applied(tool)
    assert value == 2.0
    assert "reads factor, which was 2.0 and is 3.0 now" in told
    assert "analyse_again()" in told
    assert applied(tool) == (2.0, [])
    tool.analyse_again()
    assert applied(tool) == (3.0, [])


def test_an_option_that_is_analysed_anew_or_read_by_routines_is_not_reported() -> None:
    tool = Scale(2.0)
    tool.factor = 4.0
    assert applied(tool) == (4.0, [])
    tool.offset = 1.0
    assert applied(tool) == (5.0, [])
    tool.factor = 3.0
    tool.analyse_again()
    assert applied(tool) == (4.0, [])
