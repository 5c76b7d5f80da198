"""Every option of every tool, selection, schedule and public function, given values of wrong classes."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from public_options import NEEDS, PUBLIC, TOOLS, calls, text_calls
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda.options import REQUIRED, PositiveInt, Range, Share, checked, options_of
from amanda.tools.prune import PruneTool


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_wrong_value_is_an_error_that_names_option_and_value(name: str) -> None:
    assert [f"{call} {why}" for call, why in calls(name) if why] == []


@pytest.mark.parametrize("name", TOOLS)
def test_options_of_tools_have_annotations(name: str) -> None:
    for option in options_of(TOOLS[name]).values():
        assert option.annotation not in (Any, REQUIRED), option.name


@pytest.mark.parametrize("name", TOOLS)
def test_a_wrong_text_is_an_error_that_names_option_and_text(name: str) -> None:
    assert [f"{call} {why}" for call, why in text_calls(name) if why] == []


SMALL = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def edges(annotation: Any, marks: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Yield right values at the bounds of an annotation."""
    origin, members = get_origin(annotation), get_args(annotation)
    bounds = next((mark for mark in marks if isinstance(mark, Range)), None)
    if origin is Annotated:
        yield from edges(members[0], (*marks, *annotation.__metadata__))
    elif origin in (Union, types.UnionType):
        yield from (value for member in members for value in edges(member, marks))
    elif origin is Literal:
        yield from members
    elif annotation is bool:
        yield from (True, False)
    elif annotation is int:
        least, most = (-(2**63), 2**63 - 1) if bounds is None else (bounds.least, bounds.most)
        yield from {least, most}
    elif annotation is float:
        span = bounds or Range()
        tried = (span.least, span.most, 1e-300, 1.0, 99.0, 1e308, -1e308, nan, inf, -inf)
        yield from (value for value in tried if span.holds(value))
    elif origin in (list, Sequence) and members:
        yield from ([value] for value in edges(members[0]))
    elif origin is tuple:
        yield from zip(*(list(edges(member)) for member in members), strict=True)


def train(tool: amanda.Tool) -> None:
    """Train a small model for a step under a tool, and show the result."""
    x = torch.rand(2, 2, 4, 4)
    with amanda.apply(tool):
        SMALL(x).square().mean().backward()
    str(getattr(tool, "result", ""))


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_right_values_raise_nothing_raw_in_the_model(name: str) -> None:
    for option in options_of(TOOLS[name]).values():
        for value in edges(option.annotation):
            given = {option.name: value}
            given |= {key: other for key, other in NEEDS.get(name, {}).items() if key not in given}
            try:
                train(TOOLS[name](**given))
            except AmandaError:
                continue  # options that do not go together, or a model without what is selected
            except Exception as error:
                raise AssertionError(f"{name}({option.name}={value!r}): {error!r}") from error


def test_a_subclass_checks_what_it_passes_on() -> None:
    class Mine(PruneTool):
        def __init__(self, share: Any) -> None:
            super().__init__(sparsity=share)

    with pytest.raises(AmandaError, match="Mine: sparsity is 2; give a number from 0 to 1"):
        Mine(2)
    assert Mine(0.5).pattern == "unstructured"


def test_numbers_of_numpy_arrive_as_numbers_of_python() -> None:
    @checked
    def function(count: PositiveInt, share: Share, *others: int, seeds: Sequence[int] = ()) -> Any:
        return count, share, others, seeds

    values = function(np.int64(3), np.float32(0.5), np.int8(1), seeds=(np.uint8(7),))
    assert values == (3, 0.5, (1,), [7])
    assert [type(one) for one in (*values[:2], *values[2], *values[3])] == [int, float, int, int]


def test_numbers_of_numpy_in_a_mapping_arrive_as_numbers_of_python() -> None:
    @checked
    def function(bits: Mapping[int, Share], sizes: Mapping[Iterable[int], Sequence[int]]) -> Any:
        return bits, sizes

    bits, sizes = function({np.int64(3): np.float32(0.5), 4: 1}, {frozenset([1]): [np.int8(2)]})
    assert (bits, sizes) == ({3: 0.5, 4: 1}, {frozenset([1]): [2]})
    assert [type(number) for number in (*bits, *bits.values(), *sizes[frozenset([1])])] == [
        int, int, float, int, int,
    ]  # fmt: skip
    unchanged = defaultdict(float, {3: 0.5})
    assert function(unchanged, {})[0] is unchanged
