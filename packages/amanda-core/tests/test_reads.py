"""What traceable routines read is found from their code, and copies of graphs are kept for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import amanda
from amanda.action import ActionType
from amanda.backend import Action, Reads
from amanda.graph.reads import GuardedCopies

FACTOR = 1.0


class Holding(amanda.Tool):
    """Holds a factor in several ways."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.factor = 1.0
        self.offset = 1.0
        self.factors: dict[str, Any] = {"one": [1.0]}
        self.elsewhere = Elsewhere()
        self.calling = Calling()

    def helped(self) -> float:
        return self.factor


class Elsewhere:
    """An object with a property that another package defines."""

    _factor = 1.0


def _of(holder: Elsewhere) -> float:
    return holder._factor


_of.__module__ = "another_package"
Elsewhere.factor = property(_of)  # type: ignore[attr-defined]


class Calling:
    """An object that is called."""

    factor = 1.0

    def __call__(self, value: float) -> float:
        return value * self.factor

    def __getitem__(self, index: int) -> float:
        return self.factor + index


def _undecorated(tool: Holding) -> float:
    return tool.factor


@functools.wraps(_undecorated)
def _decorated(*args: Any) -> Any:
    return None


_decorated.__module__ = "another_package"

tool = Holding()


def set_global(value: float) -> None:
    globals()["FACTOR"] = value


WAYS: dict[str, tuple[Callable[..., Any], Callable[[Holding], Any]]] = {
    "an attribute": (lambda x: x * tool.factor, lambda tool: setattr(tool, "factor", 2.0)),
    "by name": (lambda x: x * getattr(tool, "factor"), lambda tool: setattr(tool, "factor", 2.0)),  # noqa: B009
    "a variable": (lambda x: x * FACTOR, lambda tool: set_global(2.0)),
    "a method": (lambda x: x * tool.helped(), lambda tool: setattr(tool, "factor", 2.0)),
    "a container": (lambda x: x * tool.factors["one"][0], lambda tool: tool.factors.update(one=[2.0])),
    "in a container": (
        lambda x: x * tool.factors["one"][0],
        lambda tool: tool.factors["one"].__setitem__(0, 2.0),
    ),
    "a property of another package": (
        lambda x: x * tool.elsewhere.factor,  # type: ignore[attr-defined]
        lambda tool: setattr(tool.elsewhere, "_factor", 2.0),
    ),
    "a called object": (lambda x: tool.calling(x), lambda tool: setattr(tool.calling, "factor", 2.0)),
    "an object with indices": (
        lambda x: x * tool.calling[0],
        lambda tool: setattr(tool.calling, "factor", 2.0),
    ),
    "what a decorator is around": (lambda x: x * _decorated(tool), lambda tool: setattr(tool, "factor", 2.0)),
    "an argument": (
        functools.partial(lambda x, holder: x * holder.factor, holder=tool),
        lambda tool: setattr(tool, "factor", 2.0),
    ),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    tool.reset()
    set_global(1.0)


def scaled(x: float) -> float:
    return x * tool.factor


def action(routine: Callable[..., Any], **kwargs: Any) -> Action:
    return Action(ActionType.INSERT_AFTER_OP, routine, tool, None, kwargs)


def read(routine: Callable[..., Any]) -> Reads:
    """What a routine reads while it is called once."""
    reads = Reads()
    with reads.record_tracing([action(routine)]):
        routine(1.0)
    return reads


@pytest.mark.parametrize("way", WAYS)
def test_what_is_set_anew_no_longer_holds(way: str) -> None:
    routine, change = WAYS[way]
    reads = Reads()
    with reads.record_tracing([action(routine)]):
        pass
    assert reads.are_unchanged()
    tool.offset = 3.0
    assert reads.are_unchanged()
    change(tool)
    assert not reads.are_unchanged()
    assert not reads.names_written


def test_a_variable_of_an_enclosing_function_is_named_as_there() -> None:
    counts: list[float] = []

    def routine(x: float) -> float:
        counts.append(x)
        return x

    reads = read(routine)
    counts.append(0.0)
    assert reads.are_unchanged()
    assert reads.unfollowed_entries([(action(routine), ())]) == [
        ("traceable routines of Holding", "they set counts; a graph does not")
    ]


def test_what_others_set_while_routines_are_traced_is_not_theirs() -> None:
    reads = read(scaled)
    tool.factor = 2.0
    with reads.record_tracing([action(lambda x: x * tool.offset)]):
        pass
    assert not reads.names_written
    assert not reads.are_unchanged()


def copy_of(copies: GuardedCopies[str], routine: Callable[..., Any], created: list[str]) -> str:
    """The copy for what a routine reads now; what is made for it is noted."""
    copy = copies.find()
    if copy is None:
        reads = Reads()
        restless = copies.history.volatile_name(action(routine))
        copy = f"{restless} is read by Python" if restless else f"{tool.factor}, {tool.offset}"
        with reads.record_tracing([] if restless else [action(routine)]):
            created.append(copy)
        copies.add(copy, reads)
    return copy


def test_a_copy_is_kept_for_each_value_until_there_are_many() -> None:
    copies, created = GuardedCopies[str](Reads), list[str]()
    for value in (1.0, 2.0, 1.0, 2.0):
        tool.factor = value
        assert copy_of(copies, scaled, created) == f"{value}, 1.0"
    assert len(created) == 2
    for i in range(20):
        tool.factor = float(i)
        copy_of(copies, scaled, created)
    assert len(created) == 9
    assert created[-1] == "factor is read by Python"


def test_combinations_of_few_values_are_not_kept_without_end() -> None:
    copies, created = GuardedCopies[str](Reads), list[str]()
    for i in range(49):
        tool.factor, tool.offset = float(i % 7), float(i // 7)
        copy_of(copies, lambda x: x * tool.factor * tool.offset, created)
    assert len(created) == 33


def test_the_core_is_not_looked_into() -> None:
    """It leads to all tools and plans of the process."""
    reads = read(lambda x: x * tool.factor if tool._amanda.lock else x)
    assert {place.name for place in reads} >= {"factor", "_amanda"}
    assert "lock" not in {place.name for place in reads}
