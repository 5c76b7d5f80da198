"""Routines, restrictions and dependencies that are added while a scope is open take effect at once."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import amanda
from amanda import Tool
from amanda.errors import DependencyCycleError
from amanda.plan.lifetime import plan_lifetimes
from amanda.testing import FakeDriver, attached, fake

calls: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    calls.clear()
    with attached(FakeDriver):
        yield


def counting(name: str, after: bool = False) -> Callable[[amanda.OpContext], None]:
    """An analysis that counts executions of relu."""

    def count(*_: Any) -> None:
        calls[name] += 1

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "relu":
            (context.insert_after_op if after else context.insert_before_op)(count)

    return analyse


def counter(name: str) -> Tool:
    tool = Tool()
    tool.add_inst_for_op(counting(name))
    return tool


def relu() -> None:
    fake.relu(fake.tensor([1.0]))


def test_a_routine_is_added_to_a_tool_of_the_scope_around() -> None:
    outer, inner = counter("outer"), counter("inner")
    with amanda.apply(outer) as scope:
        relu()
        with amanda.apply(inner):
            relu()
            outer.add_inst_for_op(counting("added", after=True))
            relu()
            with amanda.disabled():
                relu()
        relu()
    relu()
    assert calls == {"outer": 4, "inner": 2, "added": 2}
    assert not scope.report


def test_a_restriction_and_a_wrapper_hold_from_the_next_execution_on() -> None:
    tool, second = counter("tool"), counter("other")
    with amanda.apply(tool, second):
        relu()
        tool.restrict(lambda context: False)
        relu()
        second.wrap_routines(lambda context, kind, routine: None)
        relu()
    assert calls == {"tool": 1, "other": 2}


def test_other_threads_and_bound_functions_get_it() -> None:
    tool, ran, added = counter("tool"), threading.Event(), threading.Event()

    def work() -> None:
        relu()
        ran.set()
        added.wait()
        relu()

    with amanda.apply(tool) as scope:
        thread, bound = threading.Thread(target=work), scope.bind(relu)
        thread.start()
        ran.wait()
        tool.add_inst_for_op(counting("added"))
        added.set()
        thread.join()
        bound()
    assert calls == {"tool": 3, "added": 2}


@pytest.mark.parametrize("where", ["analysis", "routine"])
def test_a_routine_is_added_by_a_routine(where: str) -> None:
    tool = Tool()

    def add(*_: Any) -> None:
        if not calls["add"]:
            calls["add"] += 1
            tool.add_inst_for_op(counting("added"))

    def analyse(context: amanda.OpContext) -> None:
        if where == "analysis":
            add()
        else:
            context.insert_before_op(add)

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        for _ in range(4):
            relu()
    assert calls == {"add": 1, "added": 3}


def test_a_backward_routine_sees_passes_whose_forward_ops_ran_after_it() -> None:
    tool, weight = Tool(), fake.Parameter([1.0], (1,))
    with amanda.apply(tool):
        for step in range(3):
            y = fake.relu(weight)
            if step == 1:
                tool.add_inst_for_op(
                    lambda context: context.insert_before_backward_op(lambda *_: calls.update(["added"])),
                    backward=True,
                )
            y.backward()
    assert calls["added"] > 0


def test_a_dependency_joins_the_open_scope_and_hears_of_its_end() -> None:
    tool, dependency, heard = counter("tool"), counter("dependency"), list[str]()
    dependency.scope_entered = lambda: heard.append("entered")  # type: ignore[method-assign]
    dependency.scope_left = lambda: heard.append("left")  # type: ignore[method-assign]
    with amanda.apply(tool):
        relu()
        tool.depends_on(dependency)
        assert heard == ["entered"]
        relu()
        with pytest.raises(DependencyCycleError):
            dependency.depends_on(tool)
        relu()
    assert heard == ["entered", "left"]
    assert calls == {"tool": 3, "dependency": 2}


def test_plans_of_former_routines_die_with_their_tool() -> None:
    gc.collect()
    before, tool = len(plan_lifetimes.stacks), counter("tool")
    with amanda.apply(tool):
        for _ in range(40):
            relu()
            tool.add_inst_for_op(lambda context: None)
    del tool
    gc.collect()
    assert len(plan_lifetimes.stacks) <= before
