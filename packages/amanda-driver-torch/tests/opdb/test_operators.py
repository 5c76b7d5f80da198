"""Torch's own operator database: its calls are seen, and stay what they are under tools that change nothing.

A sample runs with the tests, all of it by `nox -s opdb`.
"""

from collections.abc import Callable

import pytest

from ._comparison import Count, differences, not_seen
from ._variants import database
from .exceptions import REFUSED, UNDETERMINED

SLOTS, EVERY = 2, 48
"""One op of so many is in the sample, which is tested in parts."""

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says of its prototypes and deprecations


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each op, where they are not deselected anyhow: the database imports half of torch."""
    if "name" in metafunc.fixturenames:
        is_selected = metafunc.config.getoption("markexpr") in ("", "opdb")
        metafunc.parametrize("name", list(database()) if is_selected else ["every op"])


@pytest.mark.slow
@pytest.mark.parametrize("slot", range(SLOTS))
def test_calls_of_the_sample_are_bit_identical(slot: int) -> None:
    count = Count()
    assert _amiss(slot, lambda name: differing(name, 8, count)) == {}
    assert count.calls > 150
    assert count.gradients > 50


@pytest.mark.slow
@pytest.mark.parametrize("slot", range(SLOTS))
def test_all_that_calls_of_the_sample_compute_is_seen(slot: int) -> None:
    assert _amiss(slot, lambda name: list(not_seen(database()[name]))) == {}


@pytest.mark.opdb
def test_calls_are_bit_identical(name: str, record_property: Callable[[str, int], None]) -> None:
    count = Count()
    assert differing(name, 64, count) == []
    for name_of_count, n in vars(count).items():
        record_property(name_of_count, n)


@pytest.mark.opdb
def test_all_that_calls_compute_is_seen(name: str) -> None:
    assert list(not_seen(database()[name])) == []


def differing(name: str, most: int, count: Count) -> list[str]:
    """How the calls of an op differ, but for bits that torch does not determine."""
    all_differences = differences(database()[name], most, count)
    determined = [
        difference for difference in all_differences if not (name in UNDETERMINED and ".bits:" in difference)
    ]
    return [
        difference
        for difference in determined
        if not ("in autograd" in difference and f"{name}, {difference}".startswith(REFUSED))
    ]


def _amiss(slot: int, check: Callable[[str], list[str]]) -> dict[str, list[str]]:
    names = list(database())[::EVERY][slot::SLOTS]
    assert len(names) > 5
    return {name: faults for name in names if (faults := check(name))}
