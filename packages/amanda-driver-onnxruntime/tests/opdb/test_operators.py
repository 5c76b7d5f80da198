"""ONNX' own suite of operators computes the same under tools that change nothing.

A sample runs with the tests, all of it by `nox -s opdb_onnx`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ._cases import Count, differences, operators

SAMPLE = ("dropout", "identity", "if_", "loop", "optionalgetelement", "scan", "string_concat")
"""Modules with values of all kinds: sequences, optional values, strings, control flow."""

HALF = "ONNX Runtime computes neighbours in float16 in float32, with fewer roundings than one by one"
UNDETERMINED = {"test_attention_4d_fp16_expanded": HALF}
"""Cases whose last bits depend on what runs in one session."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each module of the suite."""
    if "operator" in metafunc.fixturenames:
        metafunc.parametrize("operator", operators())


@pytest.mark.parametrize("sampled", [name for name in operators() if name in SAMPLE])
def test_sessions_of_the_sample_are_bit_identical(sampled: str) -> None:
    count = Count()
    assert different(sampled, count) == []
    assert count.ran


@pytest.mark.opdb
def test_sessions_are_bit_identical(operator: str, record_property: Callable[[str, int], None]) -> None:
    count = Count()
    assert different(operator, count) == []
    for outcome, number in vars(count).items():
        record_property(outcome, number)


def different(operator: str, count: Count) -> list[str]:
    """How the cases of a module differ, but for bits that ONNX Runtime does not determine."""
    messages = differences(operator, count)
    return [
        message
        for message in messages
        if not (message.partition(",")[0] in UNDETERMINED and message.endswith(": bits"))
    ]
