"""The recursion limit, long programs, tools nobody holds, and scopes that end out of turn."""

import contextlib
import gc
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import amanda
from amanda import interceptor

X = torch.linspace(-1, 1, 20).reshape(5, 4)


class Nest(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module | None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) if self.inner is None else self.inner(x)  # type: ignore[no-any-return]


def nest(depth: int) -> Nest:
    model = Nest(None)
    for _ in range(depth):
        model = Nest(model)
    return model


def is_vanilla() -> bool:
    return type(torch.nn.Module.__call__).__name__ == "function" and interceptor.active() is None


def test_a_scope_takes_no_depth_from_a_model_whose_ops_are_known() -> None:
    low, high = 0, 500
    while high - low > 1:
        middle = (low + high) // 2
        try:
            nest(middle)(X)
            low = middle
        except RecursionError:
            high = middle
    model = nest(low)
    tool = amanda.Tool()
    with amanda.apply(tool):
        limit = sys.getrecursionlimit()
        try:
            sys.setrecursionlimit(limit + 100)  # the analysis needs room
            model(X)
        finally:
            sys.setrecursionlimit(limit)
        model(X)
        with pytest.raises(RecursionError):
            nest(high + 1)(X)
        model(X)


def test_at_any_depth_an_op_runs_or_raises_a_recursion_error(harmless: amanda.Tool) -> None:
    def deep(depth: int) -> Any:
        return torch.relu(X) if depth == 0 else deep(depth - 1)

    def opening(depth: int) -> Any:
        if depth:
            return opening(depth - 1)
        with amanda.apply(harmless):
            return torch.relu(X)

    free = sys.getrecursionlimit() - len(inspect.stack())
    for depth in range(free - 60, free, 2):
        for within in (deep, opening):
            with contextlib.suppress(RecursionError), amanda.apply(harmless):
                within(depth)
            assert is_vanilla()
            with contextlib.suppress(RecursionError):
                opening(depth)
            assert is_vanilla()
    with amanda.apply(harmless):
        assert torch.equal(torch.relu(X), X.clamp(0))


def test_a_routine_without_end_raises_its_own_recursion_error(acting: Any) -> None:
    def endless(*values: Any) -> Any:
        return endless(*values)

    with pytest.raises(RecursionError) as raised, amanda.apply(acting("insert_before_op", "relu", endless)):
        torch.relu(X)
    assert any("insert_before_op" in note for note in raised.value.__notes__)
    assert is_vanilla()


def test_the_time_of_an_op_does_not_grow_with_the_program(harmless: amanda.Tool) -> None:
    lines = 25_000

    def run(x: torch.Tensor, count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            x = x * 1.0
            x = x + 0.0
        return (time.process_time() - start) / count

    with amanda.apply(harmless), torch.no_grad():
        run(X, 200)
        short = min(run(X, 500) for _ in range(5))
        gc.collect()
        objects = len(gc.get_objects())
        long = run(X, lines)
        gc.collect()
        if not hasattr(harmless, "names"):  # which are noted
            assert len(gc.get_objects()) - objects < 100
    assert long < 4 * short


def test_a_tool_that_nobody_holds_lives_as_long_as_its_scope_or_its_graph() -> None:
    calls: list[int] = []

    def make_tool() -> amanda.Tool:
        tool = amanda.Tool()
        tool.add_inst_for_op(lambda context: context.insert_before_op(lambda: calls.append(1), inputs=[]))
        return tool

    weight = torch.ones(2, requires_grad=True)
    tool = make_tool()
    alive = weakref.ref(tool)
    scope = amanda.apply(tool).start()
    del tool
    gc.collect()
    torch.relu(X)
    assert calls == [1]
    assert alive() is not None
    scope.stop()
    del scope
    gc.collect()
    assert alive() is None
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_backward_op(lambda *_: calls.append(2)), backward=True
    )
    alive = weakref.ref(tool)
    with amanda.apply(tool):
        loss = (weight * 2).sum()
    del tool
    gc.collect()
    with amanda.apply(make_tool()):
        loss.backward()
    assert 2 not in calls
    del loss
    gc.collect()
    assert alive() is None


def test_a_tool_may_end_its_scope_in_its_routine() -> None:
    def end(*_: Any) -> None:
        nonlocal scope
        if scope is not None:
            scope.stop()
            scope = None
            gc.collect()

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(end))
    scope: amanda.Scope | None = amanda.apply(tool).start()
    del tool
    gc.collect()
    assert torch.equal(torch.nn.Sequential(Nest(None), Nest(None))(X), X.clamp(0))
    assert is_vanilla()


def test_generators_that_take_turns_end_their_scopes_in_any_order(op_log: Any) -> None:
    second_log = type(op_log)()

    def steps(tool: amanda.Tool) -> Iterator[None]:
        with amanda.apply(tool):
            while True:
                torch.relu(X)
                yield

    before = interceptor.ACTIVATION.get(None)
    first, second = steps(op_log), steps(second_log)
    next(first)
    next(second)
    first.close()
    ended = len(op_log.names)
    next(second)
    next(second)
    assert len(op_log.names) == ended
    assert second_log.names == ["relu"] * 3
    second.close()
    assert is_vanilla()
    assert interceptor.ACTIVATION.get(None) is before
    torch.relu(X)
    assert second_log.names == ["relu"] * 3


def test_a_generator_is_closed_by_another_thread_or_by_the_collector(op_log: Any) -> None:
    def steps() -> Iterator[None]:
        with amanda.apply(op_log):
            while True:
                torch.relu(X)
                yield

    suspended = steps()
    next(suspended)
    thread = threading.Thread(target=suspended.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert is_vanilla()
    suspended = steps()
    next(suspended)
    circle: list[Any] = [suspended]
    circle.append(circle)
    del suspended, circle
    gc.collect()
    assert is_vanilla()
    assert op_log.names == ["relu", "relu"]


def test_a_thread_that_raises_leaves_the_other_its_scope(op_log: Any) -> None:
    failing, failed = type(op_log)(), threading.Event()
    results: list[Any] = []

    def fail() -> None:
        def routine(*_: Any) -> None:
            raise ValueError("on purpose")

        failing.add_inst_for_op(lambda context: context.insert_after_op(routine))
        try:
            with amanda.apply(failing):
                nest(3)(X)
        except ValueError as error:
            results.append(error)
        failed.set()

    def train() -> None:
        model = torch.nn.Linear(4, 4)
        with amanda.apply(op_log):
            for step in range(20):
                if step == 10:
                    failed.wait(60)
                model(X).sum().backward()

    threads = [threading.Thread(target=run) for run in (train, fail)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "on purpose" in str(results[0])
    assert op_log.names.count("linear") == 20
    assert is_vanilla()
