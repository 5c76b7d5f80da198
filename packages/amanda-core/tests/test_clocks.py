"""Clocks of executions and trackers of storages: native code and Python keep the same records."""

import copy
import gc
import random
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from amanda import interceptor
from amanda.interceptor import _fallback

CLOCKS = [interceptor.Clock, _fallback.Clock]
TRACKERS = [interceptor.StorageTracker, _fallback.StorageTracker]


class Storage:
    """Object that takes weak references, at an address of its own."""

    addresses = iter(range(1 << 20, 1 << 30, 64))

    def __init__(self, size: int, device: str = "cpu", owner: int = -1) -> None:
        self.size, self.device, self.owner, self.address = size, device, owner, next(self.addresses)


def rows_of(clock: Any) -> list[tuple[int, ...]]:
    numbers = iter(array("q", clock.log()))
    return list(zip(numbers, numbers, numbers, numbers, strict=True))


@pytest.mark.parametrize("make", CLOCKS)
def test_time_of_an_execution_is_that_from_start_to_stop_without_what_is_excluded(
    make: Callable[..., Any],
) -> None:
    clock = make(10)
    clock.recording = True
    begin = time.perf_counter_ns()
    clock.start(0, "tag")
    clock.start(1)
    time.sleep(0.01)
    clock.exclude(4_000_000)
    assert clock.stop(1) is None
    assert clock.stop(0) == "tag"
    end = time.perf_counter_ns()
    executions, total, inner, least, most = clock.take(0)
    assert (executions, least, most) == (1, total, total)
    assert 6_000_000 <= inner <= total <= end - begin - 4_000_000
    assert clock.take(1)[1] == inner
    assert clock.take(0) is None
    (inner_row, outer_row) = rows_of(clock)
    assert (inner_row[0], outer_row[0]) == (1, 0)
    assert begin <= clock.step_begin == outer_row[1] <= inner_row[1]
    assert outer_row[1] + outer_row[2] == clock.step_end <= end
    assert outer_row[3] == threading.get_ident()


@pytest.mark.parametrize("make", CLOCKS)
def test_executions_that_raise_belong_to_the_one_around_them(make: Callable[..., Any]) -> None:
    clock = make(10)
    clock.recording = True
    for _ in range(3):
        clock.start(0)
        clock.start(1)  # raises, as does the one within it
        clock.start(2)
        clock.stop(0)
    assert clock.take(0)[0] == 3
    assert clock.take(1) is clock.take(2) is None
    for _ in range(1000):
        clock.start(3)
    clock.start(4)
    clock.stop(4)
    assert clock.take(4)[0] == 1
    for _ in range(1000):
        clock.stop(3)
    assert clock.take(3)[0] == 255  # of 256 at once, one made room for the fourth op


@pytest.mark.parametrize("make", CLOCKS)
def test_limit_is_that_of_the_log_alone(make: Callable[..., Any]) -> None:
    threads: list[int] = []
    clock = make(2, threads.append)
    clock.stop(0)  # nothing was started
    clock.start(0)  # not recording
    clock.stop(0)
    assert clock.step_begin == -1
    clock.recording = True
    for _ in range(3):
        clock.start(0)
        clock.stop(0)
    assert (len(rows_of(clock)), clock.dropped, clock.take(0)[0]) == (2, 1, 3)
    assert threads == [threading.get_ident()]
    clock.start(0)
    clock.abandon()
    clock.stop(0)
    assert clock.take(0) is None
    clock.clear()
    assert clock.recording
    assert (clock.log(), clock.dropped, clock.step_begin) == (b"", 0, -1)
    clock.add(7, 100, 150, 0)
    assert rows_of(clock) == [(7, 100, 50, 0)]
    assert threads[1:] == [0]


@pytest.mark.parametrize("make", CLOCKS)
def test_executions_nest_on_each_thread(make: Callable[..., Any]) -> None:
    clock = make(100)
    clock.recording = True
    clock.start(0)

    def run() -> None:
        clock.stop(0)  # that of another thread
        clock.start(1)
        clock.stop(1)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    clock.stop(0)
    assert [row[0] for row in rows_of(clock)] == [1, 0]
    assert clock.take(0)[2] == 0


@pytest.mark.parametrize("make", CLOCKS)
def test_copy_of_a_clock_has_its_executions(make: Callable[..., Any]) -> None:
    clock = make(100)
    clock.recording = True
    for number in (0, 300, 0):
        clock.start(number)
        clock.stop(number)
    copied = copy.deepcopy(clock)
    assert rows_of(copied) == rows_of(clock)
    assert (copied.step_begin, copied.step_end) == (clock.step_begin, clock.step_end)
    assert copied.take(0)[0] == 2
    assert clock.take(0)[0] == 2
    copied.start(300)
    copied.stop(300)
    assert copied.take(300)[0] == 2


def test_clock_ends_with_what_it_holds() -> None:
    tag = Storage(0)
    clock = interceptor.Clock(10)
    clock.recording = True
    clock.start(0, [tag, clock])
    deaths: list[int] = []
    observed = Storage(0)
    tracker = interceptor.StorageTracker(0)
    tracker.follow(observed, observed.address, 1, "cpu", -1)
    weakref.finalize(tag, deaths.append, 1)
    del clock, tag
    gc.collect()
    assert deaths == [1]


@pytest.mark.parametrize("seed", range(20))
def test_native_tracker_keeps_the_records_of_the_one_in_python(seed: int) -> None:
    choose = random.Random(seed)
    trackers = [make(50) for make in TRACKERS]
    storages: list[Storage] = []

    def records() -> list[Any]:
        found = []
        for tracker in trackers:
            accounts = tracker.accounts()
            sizes = [array("q", history)[1::2].tolist() for *_, history in accounts]
            found.append([(*account[:4], size) for account, size in zip(accounts, sizes, strict=True)])
        return found

    for _ in range(300):
        action, followed = choose.randrange(10), None
        if action < 5 or not storages:
            device, owner = choose.choice(["cpu", "cuda:0"]), choose.randrange(-1, 80)
            followed = Storage(choose.randrange(1, 1000), device, owner)
            storages.append(followed)
        elif action < 8:
            storages.pop(choose.randrange(len(storages)))
        elif action == 8:
            followed = choose.choice(storages)
            followed.size = choose.randrange(1, 1000)
        elif choose.random() < 0.3:
            for tracker in trackers:
                tracker.clear()
        else:
            recording = choose.random() < 0.7
            for tracker in trackers:
                tracker.record(recording)
        if followed is not None:
            for tracker in trackers:
                tracker.follow(followed, followed.address, followed.size, followed.device, followed.owner)
        del followed
        native, python = records()
        assert native == python
    native, python = ([tracker.take_allocated(number) for number in range(80)] for tracker in trackers)
    assert native == python


@pytest.mark.parametrize("make", TRACKERS)
def test_copy_of_a_tracker_has_the_peaks(make: Callable[..., Any]) -> None:
    tracker = make(50)
    tracker.record(True)
    storages = [Storage(100), Storage(10)]
    for owner, storage in enumerate(storages, -1):
        tracker.follow(storage, storage.address, storage.size, "cpu", owner)
    (account,) = tracker.accounts()
    copied = copy.deepcopy(tracker)
    assert copied.accounts()[0][1] == account[1] == 110
    assert copied.accounts()[0][3] == account[3] == {-1: 100, 0: 10}
    assert copied.take_allocated(0) == 10
    storages.clear()
    assert copied.accounts()[0][3] == {-1: 100, 0: 10}
    assert tracker.accounts()[0][3] == {-1: 100, 0: 10}
    del tracker
    storage = Storage(500)
    copied.follow(storage, storage.address, 500, "cpu", 1)
    assert copied.accounts()[0][1] == 500


def test_tracker_that_has_ended_hears_of_no_death() -> None:
    storage = Storage(10)
    for make in TRACKERS:
        make(10).follow(storage, storage.address, storage.size, "cpu", 0)
    del storage
    gc.collect()


def test_number_that_no_op_has_is_an_error() -> None:
    clock = interceptor.Clock(10)
    for number in (-1, 1 << 24, 1 << 40):
        with pytest.raises(ValueError, match=r"from 0 to 16777215, not -?\d+"):
            clock.start(number)
        with pytest.raises(ValueError, match=r"from 0 to 16777215"):
            interceptor.ClockObserver(clock, number)
    storage = Storage(10)
    for make in TRACKERS:
        with pytest.raises(ValueError, match="at most 16777215, not 16777216"):
            make(10).follow(storage, storage.address, storage.size, "cpu", 1 << 24)


@pytest.mark.parametrize("make", TRACKERS)
def test_storage_that_is_followed_while_it_is_followed_counts_once(
    make: Callable[..., Any],
) -> None:
    tracker, storage = make(10), Storage(1000)
    tracker.record(True)

    def follow(phase: str, _: Any) -> None:
        if phase == "start":
            tracker.follow(storage, storage.address, storage.size, "cpu", 1)

    threshold = gc.get_threshold()
    gc.callbacks.append(follow)
    try:
        gc.set_threshold(1)
        tracker.follow(storage, storage.address, storage.size, "cpu", 1)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(follow)
    (account,) = tracker.accounts()
    assert account[1] == 1000
    storage = Storage(1)
    assert tracker.accounts()[0][4][-8:] == (0).to_bytes(8, "little")
