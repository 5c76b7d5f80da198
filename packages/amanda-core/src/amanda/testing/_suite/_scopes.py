"""Meaning 10: how far a scope reaches: tasks, processes, threads, and the tasks of pools."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest

import amanda
from amanda.context import OpContext
from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Sample
from amanda.testing._tools import Executed, add_routine, inserter, tool


class ScopeTests(Rung, title="scopes", implement=("attach", "detach")):
    """A scope reaches its own tasks and backward passes, and no others."""

    def test_ops_of_a_routine_are_not_instrumented(self, sample: Sample) -> None:
        recorded: list[str] = []

        def routine(value: Any) -> Any:
            return sample.relu(sample.relu(value))

        def analysis(context: OpContext) -> None:
            recorded.append(context.get_op().__name__)
            sample.relu(context.get_inputs()[0])
            context.insert_before_op(routine)
            context.insert_after_op(routine)

        with amanda.apply(tool(analysis, sample.op_name("relu"))):
            sample.relu(sample.tensor([1.0]))
        # The calls of relu in the analysis and in the routines are not ops.
        assert recorded == [sample.op_name("relu")]

    def test_ops_of_a_backward_routine_are_not_instrumented(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        add_routine(
            relu,
            lambda context: context.insert_before_backward_op(lambda grad: sample.relu(grad)),
            sample.relu_backward,
            backward=True,
        )
        with amanda.apply(relu):
            sample.backward(sample.relu(sample.tensor([1.0], requires_grad=True)))
        assert len(relu.ids) == 1

    def test_ops_of_a_replacement_are_not_instrumented(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        add_routine(
            relu, lambda context: context.replace_op(lambda value: sample.relu(value)), sample.op_name("relu")
        )
        with amanda.apply(relu):
            sample.relu(sample.tensor([1.0]))
        assert len(relu.ids) == 1

    def test_disabled_instruments_nothing_until_enabled(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        x = sample.tensor([1.0])
        with amanda.apply(relu):
            with amanda.disabled():
                assert not amanda.is_enabled()
                sample.relu(x)
                assert relu.ids == []
                with amanda.enabled():
                    sample.relu(x)
            sample.relu(x)
        assert len(relu.ids) == 2

    def test_asyncio_tasks_do_not_see_each_others_scopes(self, sample: Sample) -> None:
        recorded = {name: Executed(sample.op_name("relu")) for name in ("one", "two")}

        async def work(recorder: Executed, times: int) -> None:
            """Run an op so many times under a tool; other tasks run in between."""
            with amanda.apply(recorder):
                for _ in range(times):
                    sample.relu(sample.tensor([1.0]))
                    await asyncio.sleep(0)

        # A task without a scope, between steps of tasks with one.
        async def bystander() -> None:
            for _ in range(5):
                sample.relu(sample.tensor([1.0]))
                await asyncio.sleep(0)

        async def main() -> None:
            await asyncio.gather(work(recorded["one"], 2), work(recorded["two"], 3), bystander())

        # All three on one thread, where only the context of a task tells whose step it is.
        asyncio.run(main())
        assert [len(recorder.ids) for recorder in recorded.values()] == [2, 3]

    @needs("backward")
    def test_a_scope_follows_the_backward_pass_that_it_starts(self, sample: Sample) -> None:
        grads: list[Any] = []
        x = sample.tensor([1.0], requires_grad=True)
        with amanda.apply(inserter("insert_before_backward_op", sample.relu_backward, grads.append)):
            sample.backward(sample.relu(x))
        assert len(grads) == 1

    @needs("backward")
    def test_backward_routines_run_only_in_a_scope_with_their_tool(self, sample: Sample) -> None:
        grads: list[Any] = []
        recorder = inserter("insert_before_backward_op", sample.relu_backward, grads.append)
        module = sample.module(lambda x: sample.relu(x))

        def forward() -> Any:
            return module(sample.tensor([1.0], requires_grad=True))

        with amanda.apply(recorder):
            sample.backward(forward())
            left_behind = forward()
        assert len(grads) == 1
        sample.backward(left_behind)
        assert len(grads) == 1
        with amanda.apply(recorder):
            inside = forward()
        with amanda.apply(recorder):
            sample.backward(inside)
        assert len(grads) == 2
        with amanda.apply(recorder):
            inside = forward()
        with amanda.apply(amanda.Tool()):
            sample.backward(inside)
        assert len(grads) == 2

    @needs("backward")
    def test_of_several_tools_those_run_whose_scope_is_open_at_the_backward_pass(
        self, sample: Sample
    ) -> None:
        runs: list[str] = []
        first, second = (
            inserter("insert_before_backward_op", sample.relu_backward, record)
            for record in (lambda _: runs.append("one"), lambda _: runs.append("two"))
        )
        module = sample.module(lambda x: sample.relu(x))
        with amanda.apply(first, second):
            sample.backward(module(sample.tensor([1.0], requires_grad=True)))
            left_behind = module(sample.tensor([1.0], requires_grad=True))
        with amanda.apply(second):
            sample.backward(left_behind)
        assert runs == ["one", "two", "two"]

    @needs("backward")
    def test_a_backward_op_is_analysed_when_its_scope_opens_for_it(self, sample: Sample) -> None:
        grads: list[Any] = []
        recorder = inserter("insert_before_backward_op", sample.relu_backward, grads.append)
        with amanda.apply(recorder):
            inside = sample.relu(sample.tensor([1.0], requires_grad=True))
        with amanda.apply(recorder):
            sample.backward(inside)
        assert len(grads) == 1

    @needs("backward", "call_sites", "checkpoints")
    def test_a_checkpoint_whose_scope_has_closed_runs_with_the_tools_of_the_backward_pass(
        self, sample: Sample
    ) -> None:
        relu = Executed(sample.op_name("relu"))
        x = sample.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
        with amanda.apply(relu):
            y = sample.checkpoint(lambda value: sample.relu(value), x)
        with amanda.apply(relu):
            sample.backward(y)
        assert len(relu.ids) == 2
        assert len(set(relu.ids)) == 1

    def test_a_scope_is_a_decorator_and_a_handle(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        x = sample.tensor([1.0])

        @amanda.apply(relu)
        def decorated() -> Any:
            return sample.relu(x)

        decorated()
        decorated()
        assert len(relu.ids) == 2
        scope = amanda.apply(relu).start()
        sample.relu(x)
        scope.stop()
        sample.relu(x)
        assert len(relu.ids) == 3

    @needs("fork")
    @pytest.mark.xfail(not hasattr(os, "fork"), reason="never: this system has no fork", run=False)
    def test_a_scope_does_not_follow_a_fork(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        x = sample.tensor([1.0])
        with amanda.apply(relu):
            sample.relu(x)
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # about threads of the framework, which the child leaves alone
                child = os.fork()
            if child == 0:  # pragma: no cover
                _check_in_child(sample, relu)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            sample.relu(x)
        assert len(relu.ids) == 2


def _check_in_child(sample: Sample, relu: Executed) -> None:  # pragma: no cover
    """Check in a forked child that the scope is closed and that others can open; exit with a status.

    0: as expected.  1: an exception.  2, 3, 4: the tool has seen an op outside of scopes, or in another
    tool's, or has not seen one in its own.
    """
    gc.disable()  # what frameworks of earlier tests have left needs threads that a child lacks
    status = 1
    try:
        sample.relu(sample.tensor([1.0]))
        status = 0 if len(relu.ids) == 1 else 2
        with amanda.apply(amanda.Tool()):
            sample.relu(sample.tensor([1.0]))
        status = status or (0 if len(relu.ids) == 1 else 3)
        with amanda.apply(relu):
            sample.relu(sample.tensor([1.0]))
        status = status or (0 if len(relu.ids) == 2 else 4)
    finally:
        # Without the exit handlers of pytest and of the framework, which belong to the parent.
        os._exit(status)


class ThreadTests(Rung, title="threads", implement=("attach", "bind_to_current_place")):
    """A scope reaches the threads that start in it."""

    def test_a_thread_started_in_a_scope_belongs_to_it(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        x = sample.tensor([1.0])
        with amanda.apply(relu) as scope:
            _in_thread(lambda: sample.relu(x))
        assert len(relu.ids) == 1
        assert scope.report == []

    def test_a_thread_that_ran_before_sees_the_scope_in_what_is_bound_to_it(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        x = sample.tensor([1.0])
        with _Worker() as before:
            with amanda.apply(relu) as scope:
                before.call(lambda: sample.relu(x))
                assert relu.ids == []
                assert [entry.what for entry in scope.report] == [f"thread {before.name}"]
                # What is bound carries the scope to a thread that started before it.
                bound = scope.bind(lambda: sample.relu(x))
                before.call(bound)
                assert len(relu.ids) == 1
            before.call(bound)
        assert len(relu.ids) == 1

    def test_a_thread_that_outlives_its_scope_sees_nothing_more(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        x = sample.tensor([1.0])
        inside, closed = threading.Event(), threading.Event()

        def work() -> None:
            sample.relu(x)
            inside.set()
            assert closed.wait(60)
            sample.relu(x)

        with amanda.apply(relu):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            assert inside.wait(60)
        closed.set()
        thread.join()
        assert len(relu.ids) == 1

    def test_a_task_of_a_pool_belongs_to_the_scope_in_which_it_was_submitted(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        x = sample.tensor([1.0])
        # One thread each, so that every task meets a thread that has run another before.
        with ThreadPoolExecutor(1) as before, ThreadPool(1) as thread_pool:
            with amanda.apply(relu), ThreadPoolExecutor(1) as inside:
                # A pool's threads serve the whole program; it is the place of `submit` that counts.
                for pool in (before, inside):
                    pool.submit(sample.relu, x).result()
                thread_pool.apply_async(sample.relu, (x,)).get()
                assert len(relu.ids) == 3
            before.submit(sample.relu, x).result()
            thread_pool.apply(sample.relu, (x,))
        assert len(relu.ids) == 3

    def test_routines_of_a_tool_run_one_at_a_time(self, sample: Sample) -> None:
        running_count = most_running = 0

        def routine(_: Any) -> None:
            """Record how many calls of this routine have run at a time."""
            nonlocal running_count, most_running
            running_count += 1
            most_running = max(most_running, running_count)
            # Long enough for the other threads to come to the same routine.
            time.sleep(0.002)
            running_count -= 1

        x = sample.tensor([1.0])

        def work() -> None:
            for _ in range(5):
                sample.relu(x)

        interval = sys.getswitchinterval()
        # The default of 5 ms would let a routine pass before another thread gets its turn.
        sys.setswitchinterval(1e-5)
        try:
            with amanda.apply(inserter("insert_before_op", sample.op_name("relu"), routine)):
                threads = [threading.Thread(target=work) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert most_running == 1


def _in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class _Worker(threading.Thread):
    """A thread that gets work through a queue of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._tasks: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._done: queue.Queue[BaseException | None] = queue.Queue()

    def __enter__(self) -> _Worker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._tasks.put(None)
        self.join()

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function on the thread, and wait; raise what it raises."""
        self._tasks.put(function)
        error = self._done.get(timeout=60)
        if error is not None:
            raise error

    def run(self) -> None:
        """Call the functions from the queue until None comes; report each one's exception, or None."""
        while (work := self._tasks.get()) is not None:
            try:
                work()
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)
