"""Meaning 10: threads, and the tasks of pools."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import amanda
from amanda.testing._sample import Sample
from amanda.testing._suite._tools import Executed, inserting


class ThreadTests:
    """Threads that a scope reaches."""

    def test_a_thread_started_in_a_scope_belongs_to_it(self, sample: Sample) -> None:
        relu = Executed(sample.name("relu"))
        x = sample.tensor([1.0])
        with amanda.apply(relu) as scope:
            _in_thread(lambda: sample.relu(x))
        assert len(relu.ids) == 1
        assert scope.report == []

    def test_a_thread_that_ran_before_sees_the_scope_in_what_is_bound_to_it(self, sample: Sample) -> None:
        relu = Executed(sample.name("relu"))
        x = sample.tensor([1.0])
        with _Worker() as before:
            with amanda.apply(relu) as scope:
                before.call(lambda: sample.relu(x))
                assert relu.ids == []
                assert [entry.what for entry in scope.report] == [f"thread {before.name}"]
                bound = scope.bind(lambda: sample.relu(x))
                before.call(bound)
                assert len(relu.ids) == 1
            before.call(bound)
        assert len(relu.ids) == 1

    def test_a_thread_that_outlives_its_scope_sees_nothing_more(self, sample: Sample) -> None:
        relu = Executed(sample.name("relu"))
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
        relu = Executed(sample.name("relu"))
        x = sample.tensor([1.0])
        with ThreadPoolExecutor(1) as before, ThreadPool(1) as thread_pool:
            with amanda.apply(relu), ThreadPoolExecutor(1) as inside:
                for pool in (before, inside):
                    pool.submit(sample.relu, x).result()
                thread_pool.apply_async(sample.relu, (x,)).get()
                assert len(relu.ids) == 3
            before.submit(sample.relu, x).result()
            thread_pool.apply(sample.relu, (x,))
        assert len(relu.ids) == 3

    def test_routines_of_a_tool_run_one_at_a_time(self, sample: Sample) -> None:
        running, most = [0], [0]

        def routine(_: Any) -> None:
            running[0] += 1
            most[0] = max(most[0], running[0])
            time.sleep(0.002)
            running[0] -= 1

        x = sample.tensor([1.0])

        def work() -> None:
            for _ in range(5):
                sample.relu(x)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            with amanda.apply(inserting("insert_before_op", sample.name("relu"), routine)):
                threads = [threading.Thread(target=work) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert most == [1]


def _in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class _Worker(threading.Thread):
    """A thread that gets work through a queue of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._given: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._done: queue.Queue[BaseException | None] = queue.Queue()

    def __enter__(self) -> _Worker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._given.put(None)
        self.join()

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function on the thread; what it raises is raised here."""
        self._given.put(function)
        error = self._done.get(timeout=60)
        if error is not None:
            raise error

    def run(self) -> None:
        """Work until there is no more."""
        while (work := self._given.get()) is not None:
            try:
                work()
                self._done.put(None)
            except BaseException as error:
                self._done.put(error)
