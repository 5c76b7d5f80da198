"""Analysis of an op that is met for the first time."""

import functools
import gc
import inspect
import threading
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import amanda
from amanda.action import routine_name
from amanda.interceptor.opid import FRAMEWORK, CodeRegistry
from amanda.plan.action import Action, ActionType, InstrumentationPoint
from amanda.plan.analysis import OpAnalysis, PendingPlan, PendingPlans
from amanda.plan.context import OpContext
from amanda.plan.facts import OpFacts
from amanda.plan.plan import Plan
from amanda.plan.tool_stack import ToolStack
from amanda.plugins import manager
from amanda.plugins.hookspecs import hookimpl


def facts() -> OpFacts:
    return OpFacts(len, 7, amanda.Namespace("fake/1/eager"), ("x",), [1], attributes={"a": 2}, scope="m.n")


def pending_plan(stack: ToolStack) -> PendingPlan[Plan]:
    context = OpContext(facts(), stack.analyse)
    plan = Plan(stack, context)
    return PendingPlan(plan, context, plan)


def test_a_pending_plan_is_shared_while_one_thread_has_it_and_forgotten_after() -> None:
    pending_plans, stack = PendingPlans(), ToolStack([], None)
    first = pending_plans.add("key", pending_plan(stack))
    assert pending_plans.find("key") is first
    del first
    gc.collect()
    assert not pending_plans._references


def test_a_stored_plan_is_taken_where_no_thread_has_a_pending_one() -> None:
    stack = ToolStack([], None)
    plan = pending_plan(stack).plan
    stack.store_plan(7, "key", plan)
    ops: Any = SimpleNamespace(without_overrides=nullcontext)
    analysis = OpAnalysis(facts(), ops, stack, "key", cache=True)
    assert analysis.plan is plan
    assert not analysis.pending
    assert OpAnalysis(facts(), ops, stack, "another key", cache=True).plan is not plan


def test_a_pending_plan_that_dies_late_leaves_the_next_one() -> None:
    pending_plans, stack = PendingPlans(), ToolStack([], None)
    old = pending_plans.add("key", pending_plan(stack))
    new = pending_plans.add("key", pending_plan(stack))
    del old
    gc.collect()
    assert pending_plans.find("key") is new


def test_nothing_is_noted_of_backward_ops_that_nobody_watches() -> None:
    plans = [pending_plan(ToolStack([], None)).plan for _ in range(2)]
    assert not any(plan.wants_backward(gradients) for plan in plans for gradients in (None, 3))
    assert plans[0].backward is plans[1].backward
    assert not plans[0].backward.analysed_for
    assert plans[0].backward.inactive_for == {None}
    assert plans[0].is_backward_complete(3)


def test_facts_of_a_backward_op_are_those_of_its_op_but_for_its_own() -> None:
    forward = facts()
    forward.grad_outputs, forward.has_dropped_values = [3], True
    backward = forward.for_backward_op("op", 8, False, 2)
    assert (backward.backward_op, backward.backward_op_id, backward.backward_order) == ("op", 8, 2)
    assert (backward.is_replaceable, backward.has_dropped_values) == (False, False)
    assert backward.grad_outputs is None
    assert (backward.op, backward.op_id, backward.scope) == (len, 7, "m.n")
    assert backward.inputs is forward.inputs
    assert backward.attributes is forward.attributes
    assert forward.backward_op_id is None


@pytest.mark.parametrize("kind", ActionType)
def test_kinds_of_actions_say_what_they_are(kind: ActionType) -> None:
    assert kind.is_backward is ("backward" in kind.value)
    assert kind.is_after is ("after" in kind.value)
    assert kind.is_replacement is ("replace" in kind.value)
    assert {kind: 1}[ActionType(kind.value)] == 1


@pytest.mark.parametrize("point", InstrumentationPoint)
def test_points_say_what_they_are(point: InstrumentationPoint) -> None:
    assert InstrumentationPoint.of(point.is_backward, point.is_after) is point


def marked() -> list[Any]:
    class Tool(amanda.Tool):
        @amanda.observer
        def method(self, run: dict[str, Any]) -> None: ...

        def plain(self, *values: Any) -> None: ...

    class Callable:
        def __call__(self, x: Any, *, run: dict[str, Any]) -> None: ...

    class Signed(Callable):
        __signature__ = inspect.Signature()  # what a caller sees

    class Wrapping:
        @functools.wraps(max)
        def __call__(self, *values: Any, run: dict[str, Any]) -> None: ...

    tool = Tool()
    watcher = amanda.observer(Callable())
    return [
        (tool.method, True, True), (tool.plain, False, False), (watcher, True, True),
        (Callable(), False, True), (amanda.observer(lambda x: x), True, False),
        (lambda x, run: x, False, True), (max, False, False),
        (Signed(), False, False), (Wrapping(), False, False), (Callable, False, False),
        (partial(Callable()), False, True), (partial(Callable(), run={}), False, True),
        (functools.wraps(max)(lambda x, run: x), False, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("routine", "observes", "takes_run"), marked())
def test_marks_and_parameters_of_a_routine_are_found(routine: Any, observes: bool, takes_run: bool) -> None:
    action = Action(ActionType.INSERT_BEFORE_OP, routine, amanda.Tool(), None, {})
    assert (action.observer, action.takes_run) == (observes, takes_run)
    assert not action.differentiable
    action = Action(ActionType.INSERT_BEFORE_OP, routine, amanda.Tool(), None, {"run": 1})
    assert not action.takes_run


def test_a_hook_that_is_registered_late_hears_of_each_analysis() -> None:
    contexts: list[OpContext] = []

    class Plugin:
        @hookimpl
        def amanda_op_analysed(self, context: OpContext) -> None:
            contexts.append(context)

    stack, plugin = ToolStack([], None), Plugin()
    context = OpContext(facts(), stack.analyse)
    context.trigger_callback(InstrumentationPoint.BEFORE_FORWARD_OP)
    assert not contexts
    manager.plugin_manager().register(plugin)
    try:
        context.trigger_callback(InstrumentationPoint.AFTER_FORWARD_OP)
    finally:
        manager.plugin_manager().unregister(plugin)
    assert contexts == [context]
    context.trigger_callback(InstrumentationPoint.AFTER_FORWARD_OP)
    assert len(contexts) == 1


def test_the_innermost_frame_is_told_by_file_and_by_code() -> None:
    registry = CodeRegistry(lambda: None)

    def inner() -> Any:
        import sys

        return registry.innermost_frame(sys._getframe(), excluded_kinds=FRAMEWORK)

    def outer() -> Any:
        return inner()

    assert outer().f_code is inner.__code__
    registry.add_code(inner.__code__, FRAMEWORK)
    assert outer().f_code is outer.__code__
    registry.add_root(__file__, FRAMEWORK)
    assert outer().f_code.co_filename != __file__
    places: list[Any] = []
    thread = threading.Thread(target=lambda: places.append(outer()))
    registry.add_root(threading.__file__, FRAMEWORK)
    thread.start()
    thread.join()
    assert places == [None]


def outer() -> list[Any]:
    def inner(x: Any) -> None:
        """Do nothing."""

    return [inner, lambda x: None, partial(inner, 1)]


class Callable_:
    def __call__(self, x: Any) -> None:
        """Do nothing."""

    def method(self, x: Any) -> None:
        """Do nothing."""


def test_routines_are_named_with_file_and_line() -> None:
    inner, nameless, filled = outer()
    line = outer.__code__.co_firstlineno
    assert routine_name(inner) == routine_name(filled) == f"inner at {__file__}:{line + 1}"
    assert routine_name(nameless) == f"lambda at {__file__}:{line + 4}"
    method = Callable_.method.__code__.co_firstlineno
    assert routine_name(Callable_().method) == f"Callable_.method at {__file__}:{method}"
    assert routine_name(Callable_()) == "Callable_ object"
    assert routine_name(abs) == "abs"
    assert routine_name(amanda.Tool.depends_on) == "Tool.depends_on"
