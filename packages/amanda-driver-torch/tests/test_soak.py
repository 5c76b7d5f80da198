"""Memory is flat however long tools stay on; `nox -s soak` runs the long version."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from memory import counts, resident
from programs import PROGRAMS, same_under

import amanda


class Everywhere(amanda.Tool):
    """Routines at every point, some of which change the value."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.forward, guard="shape")
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.same)
        context.insert_after_op(self.noted)
        if context.get_op().__name__ == "relu":
            context.insert_after_op(torch.clone, outputs=[0])

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.same)
        context.insert_after_backward_op(self.same)

    def same(self, *values: Any) -> Any:
        return values

    def noted(self, *values: Any, run: dict[str, Any]) -> None:
        run["values"] = values


def steps_of_one_model() -> Iterator[None]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.ones(2, 4)
    with amanda.apply(Everywhere()):
        while True:
            model(x).sum().backward()
            yield


def shapes_that_vary() -> Iterator[None]:
    layer = torch.nn.Linear(4, 4)
    with amanda.apply(Everywhere()):
        for size in itertools.cycle(range(1, 8)):
            layer(torch.ones(size, 4)).relu().sum().backward()
            yield


def models_that_come_and_go() -> Iterator[None]:
    with amanda.apply(Everywhere()):
        while True:
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())(torch.ones(2, 4)).sum().backward()
            yield


def no_cache() -> Iterator[None]:
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with amanda.apply(Everywhere()), amanda.cache_disabled():
        while True:
            layer(x).relu().sum().backward()
            yield


def scopes_that_open_and_close() -> Iterator[None]:
    layer, x, outer, lasting = torch.nn.Linear(4, 4), torch.ones(2, 4), Everywhere(), Everywhere()
    while True:
        with amanda.apply(outer), amanda.apply(lasting), amanda.apply(Everywhere()):
            layer(x).relu().sum().backward()
        yield


def graphs_that_are_dropped() -> Iterator[None]:
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with amanda.apply(Everywhere()):
        while True:
            loss = layer(x).relu().sum()
            (grad,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
            grad.sum()
            yield


def routines_that_raise() -> Iterator[None]:
    layer, x, tool = torch.nn.Linear(4, 4), torch.ones(2, 4), amanda.Tool()

    def fail(*_: Any) -> None:
        raise TypeError("on purpose")

    tool.add_inst_for_op(lambda context: context.insert_before_backward_op(fail), backward=True)
    while True:
        with pytest.raises(TypeError, match="on purpose"), amanda.apply(Everywhere(), tool):
            layer(x).relu().sum().backward()
        yield


USES = (
    steps_of_one_model, shapes_that_vary, models_that_come_and_go, no_cache, scopes_that_open_and_close,
    graphs_that_are_dropped, routines_that_raise,
)  # fmt: skip


def repeat(use: Iterator[None], times: int) -> None:
    for _ in itertools.islice(use, times):
        pass


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_nothing_piles_up(use: Callable[[], Iterator[None]]) -> None:
    running = use()
    repeat(running, 30)
    before, memory = counts(), resident()
    repeat(running, 150)
    after, grown = counts(), resident() - memory
    running.close()  # type: ignore[attr-defined]
    # Less than one for two steps: caches of the interpreter and of torch may grow once.
    assert {name: after[name] - count for name, count in before.items() if after[name] > count + 75} == {}
    assert grown < 3_000_000  # an arena or two of the allocator's may come once


@pytest.mark.soak
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_resident_memory_is_flat_over_ten_thousand_iterations(use: Callable[[], Iterator[None]]) -> None:
    running = use()
    repeat(running, 1_000)
    before, memory = counts(), resident()
    readings = []
    for _ in range(10):
        repeat(running, 1_000)
        readings.append(resident() - memory)
    after = counts()
    running.close()  # type: ignore[attr-defined]
    assert {name: after[name] - count for name, count in before.items() if after[name] > count + 20} == {}
    # Half a megabyte in ten thousand steps would be fifty bytes a step. A table of the interpreter's may grow
    # once: that of interned strings, by two megabytes, where names come and go.
    grown = [after - before for before, after in itertools.pairwise(readings)]
    assert sum(grown) - max(grown) < 500_000
    assert max(readings) < 3_000_000


@pytest.mark.soak
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_is_bit_identical_for_a_long_time(program: Any) -> None:
    def run() -> Any:
        step = program()
        return [step() for _ in range(200)]

    same_under(Everywhere(), run)
