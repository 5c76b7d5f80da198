"""The lock under which a tool's routines run, and what a cache and a program take."""

import os
import threading
import time
from typing import Any

import children
import pytest

from amanda import interceptor
from amanda.interceptor import CallCache, Lock

natively = pytest.mark.xfail(not interceptor.NATIVE, reason="never: Python makes no programs", run=False)


def test_one_thread_may_take_it_again_and_others_wait() -> None:
    lock, order = Lock(), []

    def other() -> None:
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock, lock:
        thread.start()
        time.sleep(0.02)
        order.append("first")
    thread.join(10)
    assert order == ["first", "other"]


def test_no_two_of_many_threads_hold_it_at_once() -> None:
    lock, inside, most, turns = Lock(), 0, 0, 0

    def work() -> None:
        nonlocal inside, most, turns
        for _ in range(200):
            with lock:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                turns += 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, turns) == (1, 1600)


def test_who_does_not_hold_it_cannot_release_it() -> None:
    lock = Lock()
    with pytest.raises(RuntimeError):
        lock.__exit__(None, None, None)
    with lock:
        failed: list[Any] = []

        def release() -> None:
            try:
                lock.__exit__(None, None, None)
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=release)
        thread.start()
        thread.join(10)
    assert len(failed) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_finds_it_free_though_another_thread_held_it() -> None:
    lock, held, done = Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        children.end_after(60)
        with lock:
            os._exit(7)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join(30)
    assert status >> 8 == 7


def test_a_memo_holds_plans_and_forgets_what_it_learned() -> None:
    plans: dict[Any, Any] = {}
    cache = CallCache(plans)
    assert cache.plans is plans
    cache.learn(5, None)
    cache.forget()
    assert len(cache) == 0


@natively
def test_a_memo_takes_programs_alone_and_stays_small() -> None:
    cache = CallCache({})
    with pytest.raises(TypeError, match="a Program or None is wanted"):
        cache.learn(5, object())  # type: ignore[arg-type]
    cache.learn(0, None)
    assert len(cache) == 0
    for key in range(1, 1000):
        cache.learn(key, None)
    assert 0 < len(cache) <= 256


@natively
@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (((print, (40,), {}, Lock(), True),), ValueError),
        (((print, (-1,), {}, Lock(), True),), ValueError),
        (((print, None, {}, object(), True),), TypeError),
        (((print, None),), TypeError),
    ],
)
def test_a_program_refuses_what_it_cannot_do(steps: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        interceptor.Program(steps, (), print)
