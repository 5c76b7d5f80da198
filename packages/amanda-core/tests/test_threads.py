"""Threads, pools and tasks that start inside a scope."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import gc
import pickle
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import children
import pytest

import amanda
from amanda import Tool, interceptor
from amanda.testing import FakeDriver, attached, fake

PATCHED: list[tuple[Any, str]] = [
    (threading.Thread, "start"),
    (_thread, "start_new_thread"),
    (_thread, "start_new"),
    (concurrent.futures.Future, "add_done_callback"),
    *((ThreadPoolExecutor, name) for name in ("__init__", "submit")),
    *((ThreadPool, name) for name in ("__init__", "apply_async", "map", "starmap", "map_async", "imap")),
]


@pytest.fixture(autouse=True)
def _fake() -> Iterator[None]:
    before = [vars(holder).get(name) for holder, name in PATCHED]
    with attached(FakeDriver):
        yield
    assert [vars(holder).get(name) for holder, name in PATCHED] == before


class Count(Tool):
    """Counts executions of relu."""

    def __init__(self) -> None:
        self.relus = 0
        self.add_inst_for_op(lambda context: context.insert_before_op(self._count))

    def _count(self, *_: Any) -> None:
        self.relus += 1


X = fake.tensor([1.0])


def relu(*_: Any) -> None:
    fake.relu(X)


def started(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


class Own(threading.Thread):
    """A thread with a `run` of its own."""

    def run(self) -> None:
        relu()


def test_every_kind_of_thread_belongs_to_its_scope() -> None:
    count, done = Count(), threading.Event()
    with amanda.apply(count) as scope:
        started(threading.Thread(target=relu))
        started(Own())
        started(threading.Timer(0, relu))
        started(threading.Thread(target=lambda: started(Own())))
        _thread.start_new_thread(lambda: (relu(), done.set()), ())
        assert done.wait(60)
    assert count.relus == 5
    assert scope.report == []


def test_a_thread_keeps_a_run_that_its_instance_has() -> None:
    count, thread = Count(), threading.Thread()
    thread.run = relu  # type: ignore[method-assign]
    with amanda.apply(count):
        started(thread)
    assert count.relus == 1
    assert vars(thread)["run"] is relu


def test_a_thread_that_started_has_nothing_of_ours() -> None:
    attributes_of_thread: list[set[str]] = []
    thread = threading.Thread(target=lambda: attributes_of_thread.append(set(vars(thread))))
    attributes = set(vars(thread))
    with amanda.apply(Count()):
        started(thread)
        with pytest.raises(RuntimeError, match="once"):
            thread.start()
    assert attributes_of_thread[0] - attributes == set(vars(thread)) - attributes == set()


def test_a_thread_whose_run_cannot_be_set_is_reported() -> None:
    class Fixed(threading.Thread):
        @property
        def run(self) -> Any:  # type: ignore[override]
            return relu

    count = Count()
    with amanda.apply(count) as scope:
        started(Fixed(name="fixed"))
    assert count.relus == 0
    assert {entry.what for entry in scope.report} == {"thread fixed"}
    assert "Fixed.run cannot be set: give it scope.bind(function)" in str(scope.report)


def test_an_exception_of_a_thread_is_the_threads() -> None:
    failed: list[Any] = []
    hook, threading.excepthook = threading.excepthook, failed.append
    try:
        with amanda.apply(Count()):
            started(threading.Thread(target=lambda: 1 // 0))
    finally:
        threading.excepthook = hook
    assert [args.exc_type for args in failed] == [ZeroDivisionError]


def test_a_thread_has_the_switches_that_it_started_in() -> None:
    count, switches = Count(), []

    def work() -> None:
        switches.append((amanda.is_enabled(), amanda.is_cache_enabled()))
        relu()
        with amanda.enabled():
            relu()

    with amanda.apply(count):
        with amanda.disabled(), amanda.cache_disabled():
            thread = threading.Thread(target=work)
            thread.start()
        thread.join()
        relu()
    assert switches == [(False, False)]
    assert count.relus == 2


def test_a_thread_that_a_routine_starts_is_outside() -> None:
    count = Count()

    def routine(*_: Any) -> None:
        started(Own())
        with ThreadPoolExecutor(1) as pool:
            pool.submit(relu).result()

    tool = Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(routine))
    with amanda.apply(tool, count):
        relu()
    assert count.relus == 1


def outliving(inner: Tool, outer: Tool, meanwhile: Callable[[Callable[[], None]], None]) -> None:
    """Let a thread that started in both scopes call relu whenever `meanwhile` asks for it."""
    ask, answer = threading.Semaphore(0), threading.Semaphore(0)
    done: list[bool] = []

    def work() -> None:
        while ask.acquire() and not done:
            relu()
            answer.release()

    thread = threading.Thread(target=work)

    def run() -> None:
        ask.release()
        assert answer.acquire(timeout=60)

    with amanda.apply(outer):
        with amanda.apply(inner):
            thread.start()
            run()
        meanwhile(run)
    run()
    done.append(True)
    ask.release()
    thread.join()


def test_a_thread_that_outlives_the_inner_scope_is_in_the_outer_one() -> None:
    inner, outer = Count(), Count()
    outliving(inner, outer, lambda run: run())
    assert (inner.relus, outer.relus) == (1, 2)


def test_a_task_that_outlives_the_inner_scope_is_in_the_outer_one() -> None:
    inner, outer = Count(), Count()

    async def main() -> None:
        async def work() -> None:
            relu()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            relu()

        with amanda.apply(outer):
            with amanda.apply(inner):
                task = asyncio.create_task(work())
                await asyncio.sleep(0)
            await task

    asyncio.run(main())
    assert (inner.relus, outer.relus) == (1, 2)


def test_a_task_that_outlives_a_switch_keeps_it_until_its_scope_closes() -> None:
    count = Count()
    cached: list[bool] = []

    async def main() -> None:
        async def work() -> None:
            await asyncio.sleep(0)
            cached.append(amanda.is_cache_enabled())
            relu()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            cached.append(amanda.is_cache_enabled())
            relu()

        with amanda.apply(count):
            with amanda.cache_disabled():
                task = asyncio.create_task(work())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await task

    asyncio.run(main())
    assert count.relus == 1
    assert cached == [False, True]


def test_a_thread_that_outlives_its_scope_lets_go_of_the_tools() -> None:
    count, leave = Count(), threading.Event()
    gone = weakref.ref(count)
    with amanda.apply(count):
        thread = threading.Thread(target=leave.wait)
        thread.start()
    del count
    gc.collect()
    assert gone() is None
    leave.set()
    thread.join()


def test_a_scope_that_a_thread_opens_adds_to_that_in_which_it_started() -> None:
    outer, inner = Count(), Count()
    with amanda.apply(outer):
        started(threading.Thread(target=amanda.apply(inner)(relu)))
    assert (outer.relus, inner.relus) == (1, 1)


def test_an_executor_made_before_serves_each_task_in_its_scope() -> None:
    first, second = Count(), Count()
    with ThreadPoolExecutor(2) as pool:
        with amanda.apply(first):
            assert list(pool.map(abs, [-1, -2])) == [1, 2]
            list(pool.map(relu, range(3)))
            with amanda.apply(second):
                pool.submit(relu).result()
        pool.submit(relu).result()
    assert (first.relus, second.relus) == (4, 1)


def test_a_task_that_waits_for_its_turn_until_the_scope_has_closed_is_outside() -> None:
    count, go = Count(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        with amanda.apply(count):
            pool.submit(go.wait)
            waiting = pool.submit(relu)
        go.set()
        waiting.result()
    assert count.relus == 0


def test_a_task_submitted_by_a_thread_without_a_scope_is_outside() -> None:
    count, opened, closing = Count(), threading.Event(), threading.Event()

    def submit_outside(pool: ThreadPoolExecutor) -> None:
        assert opened.wait(60)
        pool.submit(relu).result()
        closing.set()

    with ThreadPoolExecutor(1) as pool:
        bystander = threading.Thread(target=submit_outside, args=(pool,))
        bystander.start()
        with amanda.apply(count):
            pool.submit(relu).result()  # starts the worker
            opened.set()
            assert closing.wait(60)
        bystander.join()
    assert count.relus == 1


def test_what_follows_a_task_is_in_the_scope_that_asked_for_it() -> None:
    count, done = Count(), threading.Event()
    with ThreadPoolExecutor(1) as pool, amanda.apply(count):
        go = threading.Event()
        future = pool.submit(go.wait)
        future.add_done_callback(lambda _: (relu(), done.set()))
        go.set()
        assert done.wait(60)
    assert count.relus == 1


def test_a_pools_initializer_is_in_the_scope_that_made_the_pool() -> None:
    count = Count()
    with amanda.apply(count):
        with ThreadPoolExecutor(1, initializer=relu) as pool:
            pool.submit(int).result()
        with ThreadPool(1, relu) as threads:
            threads.apply(int)
    assert count.relus == 2


class Computed:
    """As many values as asked for, each the result of an op."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for value in range(self.length):
            relu()
            yield value


def test_every_way_to_give_work_to_a_thread_pool_is_in_the_scope() -> None:
    count, called = Count(), []
    with ThreadPool(2) as pool, amanda.apply(count):
        pool.apply(relu)
        pool.apply_async(func=relu, callback=lambda _: called.append(relu())).wait()
        pool.map(relu, range(2))
        pool.starmap(relu, [(1,), (2,)])
        pool.map_async(relu, range(2)).wait()
        pool.starmap_async(relu, [(1,)], None, lambda _: called.append(relu())).wait()
        assert list(pool.imap(relu, iter(range(2)))) == [None] * 2
        assert list(pool.imap_unordered(relu, range(2), 2)) == [None] * 2
        assert count.relus == 1 + 2 + 2 + 2 + 2 + 2 + 2 + 2
        assert pool.map(abs, Computed(3)) == [0, 1, 2]
        assert list(pool.imap(abs, Computed(2))) == [0, 1]
    assert len(called) == 2
    assert count.relus == 15 + 5


def test_work_handed_to_an_event_loop_on_another_thread_is_in_the_scope() -> None:
    count, done = Count(), threading.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def work() -> None:
        relu()
        await asyncio.to_thread(relu)
        await loop.run_in_executor(None, relu)

    with amanda.apply(count):
        asyncio.run_coroutine_threadsafe(work(), loop).result(60)
        loop.call_soon_threadsafe(lambda: (relu(), done.set()))
        assert done.wait(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert count.relus == 4


def test_what_goes_to_another_process_is_the_programs_own() -> None:
    class Sending(ThreadPoolExecutor):
        """An executor that pickles its tasks, as one of interpreters does."""

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            return super().submit(fn, *args, **kwargs)

    unpickled: list[Any] = []
    with amanda.apply(Count()):
        from amanda.scope.threads import _bound_to_scopes, _inherited_state

        unpickled.append(pickle.loads(pickle.dumps(_bound_to_scopes(relu, _inherited_state()))))
    assert unpickled == [relu]


PATCHING = """
import threading
import time
import amanda

def wrapped(start):
    def outer(self):
        seen.append(self.name)
        start(self)
    return outer

seen, original = [], threading.Thread.start
scope = amanda.apply(amanda.Tool()).start()
assert threading.Thread.start is not original
threading.Thread.start = wrapped(threading.Thread.start)
theirs = threading.Thread.start
scope.stop()
assert threading.Thread.start is theirs
for _ in range(2):
    with amanda.apply(amanda.Tool()):
        thread = threading.Thread(target=lambda: seen.append("ran"), name="one")
        thread.start()
        thread.join()
    assert threading.Thread.start is theirs
assert seen == ["one", "ran"] * 2, seen
"""


def test_what_the_program_puts_in_the_place_of_start_stays() -> None:
    done = children.run([sys.executable, "-W", "error", "-c", PATCHING])
    assert done.returncode == 0, done.stderr


LATER = """
import sys
import amanda
from amanda.scope.state import State

assert not {"concurrent.futures", "multiprocessing.pool"} & set(sys.modules), "imported by amanda"
tool = amanda.Tool()
in_scope = lambda *_: State.current().is_open(tool)
with amanda.apply(tool):
    assert not {"concurrent.futures", "multiprocessing.pool"} & set(sys.modules), "imported by a scope"
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing.pool import ThreadPool
    with ThreadPoolExecutor(1) as pool, ThreadPool(1) as other:
        assert pool.submit(in_scope).result()
        assert other.map(in_scope, [1]) == [True]
assert "amanda" not in ThreadPoolExecutor.submit.__code__.co_filename
assert "map" not in vars(ThreadPool)
"""


def test_pools_that_are_imported_inside_a_scope_bring_it_along() -> None:
    done = children.run([sys.executable, "-c", LATER])
    assert done.returncode == 0, done.stderr


def test_threads_start_outside_where_a_scope_is_open_elsewhere() -> None:
    count, opened = Count(), threading.Barrier(2, timeout=60)

    def elsewhere() -> None:
        with amanda.apply(count):
            opened.wait()
            opened.wait()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    opened.wait()
    started(Own())
    opened.wait()
    thread.join()
    assert count.relus == 0
    assert interceptor.active() is None


@pytest.fixture
def server() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Run a function on a thread that started before any scope, through a queue of the test's own."""
    requests: queue.Queue[Callable[[], Any] | None] = queue.Queue()
    answers: queue.Queue[Any] = queue.Queue()

    def serve() -> None:
        while (function := requests.get()) is not None:
            answers.put(function())

    thread = threading.Thread(target=serve, name="server")
    thread.start()
    yield lambda function: (requests.put(function), answers.get(timeout=60))[1]
    requests.put(None)
    thread.join()


def test_a_thread_that_started_before_is_named_once_by_each_scope(server: Callable[..., Any]) -> None:
    for _ in range(2):
        with amanda.apply(Count()) as scope, amanda.apply(Count()) as inner:
            server(relu)
            server(relu)
        assert [entry.what for entry in scope.report] == ["thread server"]
        assert "scope.bind(function)" in str(inner.report)


def test_a_thread_to_which_the_scope_is_brought_is_not_named(server: Callable[..., Any]) -> None:
    count = Count()
    with amanda.apply(count) as scope:
        server(scope.bind(relu))
    assert not scope.report
    assert count.relus == 1


def test_a_thread_on_which_tools_are_switched_off_is_not_named(server: Callable[..., Any]) -> None:
    with amanda.apply(Count()) as scope:
        server(amanda.disabled()(relu))
        server(scope.bind(amanda.disabled()(relu)))
        assert not scope.report
        server(relu)
    assert len(scope.report) == 1


def test_a_thread_that_opens_scopes_itself_is_not_named(server: Callable[..., Any]) -> None:
    server(amanda.apply(Count())(relu))
    with amanda.apply(Count()) as scope:
        server(relu)
    assert not scope.report


def test_a_thread_whose_ops_ran_before_and_after_is_not_named(server: Callable[..., Any]) -> None:
    server(relu)
    with amanda.apply(Count()) as scope:
        pass
    server(relu)
    assert not scope.report


class Analyses(Tool):
    """Notes each analysis routine that runs, and gives other threads time to meet the op meanwhile."""

    def __init__(self) -> None:
        self.ran: list[tuple[int | None, bool]] = []
        for require_outputs in (False, True):
            self.add_inst_for_op(partial(self._note, require_outputs), require_outputs=require_outputs)
            self.add_inst_for_op(
                partial(self._note, require_outputs), backward=True, require_outputs=require_outputs
            )

    def _note(self, after: bool, context: amanda.OpContext) -> None:
        self.ran.append((context.get_backward_op_id() or context.get_op_id(), after))
        time.sleep(0.002)
        if context.is_forward() and not after:
            context.insert_before_op(lambda *_: None)


def test_an_op_that_several_threads_meet_at_once_is_analysed_once() -> None:
    tool, meeting = Analyses(), threading.Barrier(8)

    def work() -> list[float]:
        x = fake.tensor([1.0, -2.0], requires_grad=True)
        meeting.wait()
        y = fake.sum(fake.relu(x))
        meeting.wait()
        y.backward()
        assert x.grad is not None
        return list(x.grad.numbers)

    with amanda.apply(tool), ThreadPoolExecutor(8) as pool:
        results = [future.result() for future in [pool.submit(work) for _ in range(8)]]
    assert results == [[1.0, 0.0]] * 8
    assert len(tool.ran) == len(set(tool.ran))


class Factor(float):
    """A number whose first product fails once another thread has had its own."""

    def __init__(self, _: float) -> None:
        self.begun, self.second_thread = threading.Event(), threading.Event()

    def __rmul__(self, number: float) -> float:
        if not self.begun.is_set():
            self.begun.set()
            self.second_thread.wait(10)
            raise ArithmeticError
        return number * float(self)


def test_an_analysis_is_finished_by_another_thread_if_the_op_of_the_first_fails() -> None:
    tool, factor = Analyses(), Factor(2.0)

    def work() -> list[float]:
        return list(fake.mul(X, factor).numbers)

    with amanda.apply(tool), ThreadPoolExecutor(2) as pool:
        failing = pool.submit(work)
        factor.begun.wait(10)
        assert pool.submit(work).result() == [2.0]
        factor.second_thread.set()
        with pytest.raises(ArithmeticError):
            failing.result()
    assert [after for _, after in tool.ran] == [False, True]
