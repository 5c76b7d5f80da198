"""ONNX' own suite of operators computes the same under tools that change nothing.

A sample runs with the tests, all of it by `nox -s opdb_onnx`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ._cases import Count, differences, operators

SAMPLE = ("dropout", "identity", "if_", "loop", "optionalgetelement", "scan", "string_concat")
"""Modules with values of all kinds: sequences, optional values, strings, control flow."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each module of the suite."""
    if "operator" in metafunc.fixturenames:
        metafunc.parametrize("operator", operators())


@pytest.mark.parametrize("sampled", [name for name in operators() if name in SAMPLE])
def test_sessions_of_the_sample_are_bit_identical(sampled: str) -> None:
    count = Count()
    assert list(differences(sampled, count)) == []
    assert count.ran


@pytest.mark.opdb
def test_sessions_are_bit_identical(operator: str, record_property: Callable[[str, int], None]) -> None:
    count = Count()
    assert list(differences(operator, count)) == []
    for outcome, number in vars(count).items():
        record_property(outcome, number)
