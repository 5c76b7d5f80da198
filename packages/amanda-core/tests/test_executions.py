"""Executions of graphs are told by numbers, of which frameworks keep tensors."""

from typing import Any

from amanda.backend import Execution


def made() -> Execution:
    unused: Any = None
    return Execution(unused, unused, {})


def test_numbers_are_given_again_so_that_there_are_few() -> None:
    assert len({made().number for _ in range(1_000)}) < 100


def test_living_executions_have_numbers_of_their_own() -> None:
    for _ in range(100):
        made()
    living = [made() for _ in range(1_000)]
    assert len({one.number for one in living}) == 1_000
