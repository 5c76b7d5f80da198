"""Scopes: opening, closing, nesting, switches, reports, and drivers that come and go."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import amanda
from amanda import Tool, interceptor
from amanda.backend import DRIVER_API, Driver, Namespace
from amanda.errors import DependencyCycleError, DriverError, ScopeError, ToolError
from amanda.plugins import hookimpl, plugin_manager
from amanda.scope.attachment import attachment
from amanda.scope.state import State
from amanda.testing import FakeDriver, attached, fake


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    with attached(FakeDriver):
        yield
    assert attachment._scopes == []
    assert State.current().stack is None
    assert interceptor.active() is None


class Count(Tool):
    """Counts executions of relu."""

    def __init__(self) -> None:
        self.relus = 0
        self.add_inst_for_op(self._analyse)

    def _analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "relu":
            context.insert_before_op(self._count)

    def _count(self, *_: Any) -> None:
        self.relus += 1


def relu() -> None:
    fake.relu(fake.tensor([1.0]))


def test_a_scope_wants_instances_of_tools() -> None:
    with pytest.raises(ToolError, match=r"give an instance: Count\(\)"):
        amanda.apply(Count)  # type: ignore[arg-type]
    with pytest.raises(ToolError, match="not 3"):
        amanda.apply(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        amanda.apply(None)  # type: ignore[arg-type]


def test_a_cycle_is_found_before_the_scope_opens() -> None:
    first, second = Count(), Count()
    first.depends_on(second)
    second.depends_on(first)
    with pytest.raises(DependencyCycleError):
        amanda.apply(first)


def test_apply_is_found_where_the_paper_has_it() -> None:
    assert amanda.tool.apply is amanda.apply


def test_a_scope_opens_and_closes_and_opens_again() -> None:
    count = Count()
    scope = amanda.apply(count)
    for _ in range(3):
        assert scope.closed
        with scope as entered:
            assert entered is scope
            assert not scope.closed
            relu()
        relu()
    assert count.relus == 3
    assert "closed scope of Count" in repr(scope)


def test_an_open_scope_is_not_opened_again() -> None:
    scope = amanda.apply(Count())
    with scope, pytest.raises(ScopeError, match="open already"):
        scope.__enter__()


def test_a_closed_scope_is_not_closed_again() -> None:
    scope = amanda.apply(Count())
    with pytest.raises(ScopeError, match="not open"):
        scope.stop()
    scope.start()
    scope.stop()
    with pytest.raises(ScopeError, match="not open"):
        scope.stop()


def test_a_handle_started_in_one_context_is_stopped_in_another() -> None:
    count = Count()
    scope = amanda.apply(count)
    contextvars.copy_context().run(scope.start)
    contextvars.copy_context().run(scope.stop)
    relu()
    assert count.relus == 0
    assert scope.closed


def test_a_handle_started_in_a_task_is_stopped_outside() -> None:
    scope = amanda.apply(Count())

    async def start() -> None:
        scope.start()

    asyncio.run(start())
    scope.stop()
    assert interceptor.active() is None


def test_a_context_copied_in_a_scope_sees_nothing_after_it_closed() -> None:
    count = Count()
    with amanda.apply(count):
        copied = contextvars.copy_context()
        copied.run(relu)
    copied.run(relu)
    assert count.relus == 1


def test_scopes_are_closed_in_any_order() -> None:
    first, second = Count(), Count()
    outer, inner = amanda.apply(first).start(), amanda.apply(second).start()
    outer.stop()
    relu()
    inner.stop()
    relu()
    assert first.relus == 0


def test_an_exception_closes_the_scope_and_passes() -> None:
    count = Count()
    with pytest.raises(ZeroDivisionError), amanda.apply(count):
        raise ZeroDivisionError
    relu()
    assert count.relus == 0


def test_a_decorated_function_keeps_its_name_and_may_call_itself() -> None:
    count = Count()

    @amanda.apply(count)
    def down(n: int) -> int:
        """Go down."""
        relu()
        return down(n - 1) if n else 7

    assert down(2) == 7
    assert count.relus == 3
    assert down.__name__ == "down"
    assert down.__doc__ == "Go down."


def test_a_decorated_function_runs_on_two_threads_at_once() -> None:
    count, barrier = Count(), threading.Barrier(2, timeout=10)

    @amanda.apply(count)
    def work() -> None:
        barrier.wait()
        relu()
        barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.relus == 2


def test_a_coroutine_function_is_decorated() -> None:
    count = Count()

    @amanda.apply(count)
    async def work() -> int:
        relu()
        await asyncio.sleep(0)
        relu()
        return 3

    async def main() -> list[int]:
        return await asyncio.gather(work(), work())

    assert asyncio.run(main()) == [3, 3]
    assert count.relus == 4


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_a_generator_function_is_instrumented_while_it_runs(kind: str) -> None:
    count = Count()

    @amanda.apply(count)
    def numbers() -> Iterator[int]:
        relu()
        yield 1
        relu()
        yield 2

    @amanda.apply(count)
    async def awaited() -> Any:
        relu()
        yield 1
        relu()
        yield 2

    async def collected() -> list[int]:
        return [number async for number in awaited()]

    assert (list(numbers()) if kind == "generator" else asyncio.run(collected())) == [1, 2]
    assert count.relus == 2


def test_a_decorated_generator_is_a_whole_one() -> None:
    closed: list[str] = []

    @amanda.apply(Count())
    def echo() -> Any:
        sent = []
        try:
            while True:
                try:
                    sent.append((yield len(sent)))
                except ZeroDivisionError:
                    sent.append("caught")
                if sent[-1] == "stop":
                    return sent
        finally:
            closed.append("closed")

    generator = echo()
    assert [next(generator), generator.send("a"), generator.throw(ZeroDivisionError())] == [0, 1, 2]
    assert interceptor.active() is None
    with pytest.raises(StopIteration) as stopped:
        generator.send("stop")
    assert stopped.value.value == ["a", "caught", "stop"]
    generator = echo()
    next(generator)
    generator.close()
    with pytest.raises(KeyError):
        next(generator := echo()), generator.throw(KeyError())
    assert closed == ["closed"] * 3


def test_a_hook_that_fails_leaves_no_scope_open() -> None:
    class Plugin:
        @staticmethod
        @hookimpl
        def amanda_scope_entered(scope: amanda.Scope) -> None:
            raise ZeroDivisionError

    manager, plugin = plugin_manager(), Plugin()
    manager.register(plugin)
    try:
        with pytest.raises(ZeroDivisionError), amanda.apply(Count()):
            pass
    finally:
        manager.unregister(plugin)


def test_a_scope_of_no_tools_instruments_nothing() -> None:
    with amanda.apply() as scope:
        relu()
    assert scope.report == []


def test_a_tool_that_is_open_already_is_not_applied_twice() -> None:
    count = Count()
    with amanda.apply(count), amanda.apply(count), amanda.apply(count, count):
        relu()
    assert count.relus == 1


def test_bind_wants_an_open_scope() -> None:
    with pytest.raises(ScopeError, match="open it first"):
        amanda.apply(Count()).bind(relu)


def test_switches_nest_and_come_back() -> None:
    assert amanda.is_enabled()
    assert amanda.is_cache_enabled()
    with amanda.disabled(), amanda.cache_disabled():
        assert not amanda.is_enabled()
        assert not amanda.is_cache_enabled()
        with amanda.enabled(), amanda.cache_enabled():
            assert amanda.is_enabled()
            assert amanda.is_cache_enabled()
        assert not amanda.is_enabled()
    with pytest.raises(ZeroDivisionError), amanda.disabled():
        raise ZeroDivisionError
    assert amanda.is_enabled()


def test_a_switch_outside_holds_in_a_scope() -> None:
    count = Count()
    with amanda.disabled(), amanda.apply(count):
        relu()
    assert count.relus == 0
    with amanda.cache_disabled(), amanda.apply(count):
        assert not amanda.is_cache_enabled()
    with amanda.apply(count):
        relu()
    assert count.relus == 1


def test_a_switch_made_outside_a_scope_holds_in_it() -> None:
    count, switch = Count(), amanda.cache_disabled()
    with amanda.apply(count), switch:
        relu()
    assert count.relus == 1


@pytest.mark.parametrize("switch", [amanda.disabled, amanda.enabled, amanda.cache_disabled])
def test_a_switch_is_a_decorator(switch: Any) -> None:
    count = Count()

    @switch()
    def work() -> bool:
        relu()
        return amanda.is_enabled()

    with amanda.apply(count):
        assert work() == work() == (switch is not amanda.disabled)
    assert count.relus == (0 if switch is amanda.disabled else 2)


def test_a_report_lists_each_thing_once_and_is_printed() -> None:
    with amanda.apply(Count()) as scope:
        for _ in range(3):
            fake.opaque(fake.tensor([1.0]))
    ((subject, reason, where),) = scope.report
    assert (subject, reason, where) == ("opaque", "it has no operators inside", "")
    assert str(scope.report) == "opaque  it has no operators inside"


def test_nested_scopes_are_all_told() -> None:
    with amanda.apply(Count()) as outer, amanda.apply(Count()) as inner:
        fake.opaque(fake.tensor([1.0]))
    assert outer.report == inner.report != []


class Counting(Driver):
    """A driver that counts."""

    api, framework, modes = DRIVER_API, "fake", ("counting",)
    events: list[str]

    @property
    def namespace(self) -> Namespace:
        return Namespace("fake/1/counting")

    def attach(self) -> None:
        self.events.append("attach")

    def detach(self) -> None:
        self.events.append("detach")


def test_a_driver_is_attached_while_any_scope_is_open() -> None:
    class Own(Counting):
        events: list[str] = []  # noqa: RUF012

    with attached(Own):
        assert Own.events == []
        with amanda.apply(Count()):
            assert Own.events == ["attach"]
            with amanda.apply(Count()):
                pass
            thread = threading.Thread(target=amanda.apply(Count())(relu))
            thread.start()
            thread.join()
            assert Own.events == ["attach"]
        assert Own.events == ["attach", "detach"]
        with pytest.raises(ZeroDivisionError), amanda.apply(Count()):
            raise ZeroDivisionError
    with amanda.apply(Count()):
        pass
    assert Own.events == ["attach", "detach"] * 2


def test_the_last_of_two_overlapping_scopes_detaches() -> None:
    class Own(Counting):
        events: list[str] = []  # noqa: RUF012

    with attached(Own):
        first, second = amanda.apply(Count()), amanda.apply(Count())
        first.start()
        second.start()
        first.stop()
        assert Own.events == ["attach"]
        second.stop()
        assert Own.events == ["attach", "detach"]


@pytest.mark.parametrize("error", [DriverError("version 9 is not known"), ZeroDivisionError("boom")])
def test_a_driver_that_cannot_attach_is_reported_and_stops_no_other(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Counting):
        events: list[str] = []  # noqa: RUF012

        def attach(self) -> None:
            raise error

    count = Count()
    with attached(Failing), caplog.at_level(logging.DEBUG, "amanda"):
        for _ in range(2):
            with amanda.apply(count) as scope, amanda.apply(Count()) as inner:
                relu()
            assert str(error) in scope.report[0].reason
            assert scope.report == inner.report
    # With the traceback, for the driver's author.
    assert error in [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert Failing.events == ["detach", "detach"]
    assert count.relus == 2


def test_hooks_hear_of_drivers_scopes_and_ops() -> None:
    heard: list[str] = []

    class Plugin:
        @staticmethod
        @hookimpl
        def amanda_scope_entered(scope: amanda.Scope) -> None:
            heard.append("entered")

        @staticmethod
        @hookimpl
        def amanda_scope_left(scope: amanda.Scope) -> None:
            heard.append("left")

        @staticmethod
        @hookimpl
        def amanda_driver_attached(driver: Driver) -> None:
            if isinstance(driver, FakeDriver):
                heard.append("attached")

        @staticmethod
        @hookimpl
        def amanda_driver_detached(driver: Driver) -> None:
            if isinstance(driver, FakeDriver):
                heard.append("detached")

        @staticmethod
        @hookimpl
        def amanda_op_analysed(context: amanda.OpContext) -> None:
            heard.append(context.get_op().__name__)

    manager, plugin = plugin_manager(), Plugin()
    manager.register(plugin)
    try:
        with amanda.apply(Count()):
            relu()
    finally:
        manager.unregister(plugin)
    assert heard[:2] == ["attached", "entered"]
    assert set(heard[2:-2]) == {"relu"}
    assert sorted(heard[-2:]) == ["detached", "left"]


def test_a_closed_scope_and_its_tools_can_be_freed() -> None:
    count = Count()
    scope = amanda.apply(count)
    with scope:
        relu()
        bound = scope.bind(relu)
    dead = weakref.ref(count), weakref.ref(scope)
    del count, scope, bound
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


@pytest.mark.slow
def test_a_thousand_scopes_leave_nothing() -> None:
    count = Count()

    def scopes(number: int) -> int:
        for _ in range(number):
            with amanda.apply(count):
                pass
        gc.collect()
        return len(gc.get_objects())

    scopes(100)
    before = scopes(100)
    assert scopes(1000) - before < 20


def test_a_scope_may_be_left_while_a_switch_of_it_is_open() -> None:
    count = Count()
    scope = amanda.apply(count).start()
    with amanda.cache_disabled():
        scope.stop()
        relu()
    relu()
    assert count.relus == 0
    assert interceptor.active() is None


def test_ops_are_not_intercepted_for_tools_that_ask_for_none() -> None:
    class Opens(amanda.Tool):
        intercepts = False

    with amanda.apply(Opens()):
        assert interceptor.active() is None
        assert not attachment._attached
        with amanda.apply(amanda.Tool(), Opens()):
            assert interceptor.active() is not None
            assert attachment._attached
        assert interceptor.active() is None
        assert not attachment._attached


class InterruptAt:
    """Raises SIGINT before one instruction, counted in files of these names.

    In the program Python handles no signal between the end of a block and the call of `__exit__`.
    """

    def __init__(self, number: int, *files: str) -> None:
        self.number, self.files, self.count = number, files, 0

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.number:
                signal.raise_signal(signal.SIGINT)
        return self


class Told(Tool):
    """Counts the scopes that it is told of."""

    entered = left_count = 0

    def scope_entered(self) -> None:
        self.entered += 1

    def scope_left(self) -> None:
        self.left_count += 1


@pytest.mark.slow
@pytest.mark.xfail(not interceptor.NATIVE, reason="never: a signal may come before code in Python", run=False)
def test_an_interrupt_before_any_instruction_leaves_no_scope_open() -> None:
    files = ("scope/scope.py", "interceptor/interrupts.py")
    tool = Told()

    def program() -> None:
        with amanda.apply(tool):
            fake.relu(fake.tensor([1.0]))

    def interrupted(number: int) -> InterruptAt:
        at, before = InterruptAt(number, *files), sys.gettrace()
        sys.settrace(at)
        try:
            program()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return at

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        program()
        interrupted(0)  # CPython 3.12 traces instructions from the second time on
        total = interrupted(0).count
        assert total > 300
        for number in range(1, total + 1, 1 if "AMANDA_EVERY_CALL" in os.environ else 7):
            interrupted(number)
            assert attachment._scopes == [], f"before instruction {number} of {total}"
            assert interceptor.active() is None
            assert tool.left_count >= tool.entered - 1
            tool.left_count = tool.entered
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
