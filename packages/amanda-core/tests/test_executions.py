"""Executions of graphs are told by numbers, of which frameworks keep tensors."""

from typing import Any

import pytest

from amanda.backend import Execution


def new_execution() -> Execution:
    unused: Any = None
    return Execution(unused, unused, {})


def test_numbers_are_given_again_so_that_there_are_few() -> None:
    assert len({new_execution().number for _ in range(1_000)}) < 100


def test_living_executions_have_numbers_of_their_own() -> None:
    for _ in range(100):
        new_execution()
    living = [new_execution() for _ in range(1_000)]
    assert len({execution.number for execution in living}) == 1_000


def test_an_execution_that_was_interrupted_before_it_had_a_number_goes_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Execution._numbers, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        new_execution()
