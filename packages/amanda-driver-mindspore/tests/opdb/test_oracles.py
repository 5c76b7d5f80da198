"""Calls and training give the same bits under tools that change nothing, whatever their routines return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import pytest

from ._oracles import ORACLES, call_record, differences
from ._samples import arguments, function
from ._zoo import PROGRAMS, trained

LINES = Path(__file__).with_name("functions.txt").read_text().splitlines()[1:]
EVERY, GROUPS = 12, 12
"""One function in so many is in the sample; in so many groups are the others tested."""
MODES = ("1", "0")
"""Values of MS_JIT: with 0 MindSpore runs op by op what it compiles otherwise, such as optimizers."""


CAST_BY_HOOKS = ["mint.real(x)"]
"""Calls whose gradient is complex for a real input, and real where a hook gives one: MindSpore casts it."""


@pytest.fixture(autouse=True)
def _blocking() -> None:
    ms.runtime.launch_blocking()  # or errors of ops are raised at a later one


def calls(lines: list[str]) -> dict[str, Callable[[], Any]]:
    """Return the calls of functions, by their text."""
    return {text: record for line in lines for text, record in _calls_of(line)}


def _calls_of(line: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    name, *each = line.split("; ")
    for names in each:
        yield f"{name}({names})", partial(call_record, function(name), partial(arguments, names))


# First: after some calls, such as `mint.all(x, 1)`, MindSpore itself refuses integers as indices of tensors.
@pytest.mark.slow
@pytest.mark.parametrize("oracle", ["echo", "equal"])
@pytest.mark.parametrize("name", ["convolutions, Adam", "written, ASGD"])
def test_training_of_the_sample_is_bit_identical(
    name: str, oracle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MS_JIT", "0")
    assert differences({name: partial(trained, PROGRAMS[name])}, oracle) == {}


@pytest.mark.opdb
@pytest.mark.parametrize("jit", MODES)
@pytest.mark.parametrize("oracle", ORACLES)
def test_training_is_bit_identical(jit: str, oracle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_JIT", jit)
    assert differences({name: partial(trained, program) for name, program in PROGRAMS.items()}, oracle) == {}


@pytest.mark.slow
@pytest.mark.parametrize("oracle", ORACLES)
def test_calls_of_the_sample_are_bit_identical(oracle: str) -> None:
    sample = calls(LINES[::EVERY])
    assert len(sample) > 30
    assert differences(sample, oracle) == {}


@pytest.mark.opdb
@pytest.mark.parametrize("oracle", ORACLES)
@pytest.mark.parametrize("group", range(GROUPS))
def test_calls_are_bit_identical(
    oracle: str, group: int, record_property: Callable[[str, int], None]
) -> None:
    sample = calls(LINES[group::GROUPS])
    record_property("calls", len(sample))
    different = differences(sample, oracle)
    assert {name: how for name, how in different.items() if name not in CAST_BY_HOOKS} == {}
