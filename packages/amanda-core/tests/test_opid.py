"""Ids of ops: the same numbers in C and Python, no collisions, and what they are made of."""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import children
import pytest

from amanda import interceptor
from amanda.interceptor.opid import (
    FRAMEWORK,
    MASK,
    SITE_STEP,
    SKIPPED,
    CodeRegistry,
    code_hash,
    digest,
    first_instructions,
    mix,
)

PROGRAM = """
import sys
import amanda
from amanda import interceptor
from amanda.testing import FakeDriver, attached, fake

class Seen(amanda.Tool):
    def __init__(self):
        self.ids = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)
    def forward(self, context):
        op_id = context.get_op_id()
        context.insert_before_op(lambda *_: self.ids.append(op_id))
    def backward(self, context):
        op_id = context.get_backward_op_id()
        context.insert_before_backward_op(lambda *_: self.ids.append(op_id))

class Net(fake.Module):
    def __init__(self):
        self.layers = [fake.Linear(fake.Parameter([1.0, 2.0, 3.0, 4.0], (2, 2))) for _ in range(3)]
        for i, layer in enumerate(self.layers):
            setattr(self, f"layer{i}", layer)
    def forward(self, x):
        for layer in self.layers:
            x = fake.relu(layer(x)) + x
        for _ in range(interceptor.OCCURRENCE_CAP + 5):
            x = fake.relu(x)
        y = fake.add(fake.relu(x), fake.relu(x))
        return fake.checkpoint(lambda value: self.layer0(self.twice(value)), y)
    def twice(self, x):
        return fake.add(*[self.once(x) for _ in range(2)])
    def once(self, x):
        return fake.mul(x, 2.0)

seen, shared = Seen(), fake.Parameter([1.0, 0.0, 0.0, 1.0], (2, 2))
with attached(FakeDriver), amanda.apply(seen):
    models = [Net(), Net()]
    for _ in range(2):
        x = fake.tensor([[1.0, -2.0]], requires_grad=True)
        for model in models:
            y = model(model(x))
            z = fake.matmul(fake.matmul(y, shared), models[0].layer1.weight)
            fake.sum(fake.cat([z, fake.split(z)[1]])).backward()
    for _ in range(100):
        fake.relu(x)
    models.clear()
    fake.matmul(x, fake.Parameter([1.0, 0.0], (2, 1)))
print(len(set(seen.ids)))
print(*seen.ids)
"""


PLACES = Path(__file__).parent / "support" / "places.py"


def ids(native: str, *program: str) -> list[str]:
    done = children.run(
        [sys.executable, *(program or ("-c", PROGRAM))],
        env={**os.environ, "AMANDA_NATIVE": native},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.xfail(not interceptor.NATIVE, reason="never: nothing native to compare", run=False)
def test_native_and_python_interceptors_give_the_same_ids() -> None:
    native = ids("1")
    assert int(native[0]) > 200
    assert native == ids("0")


@pytest.mark.xfail(not interceptor.NATIVE, reason="never: nothing native to compare", run=False)
def test_what_native_code_remembers_goes_with_what_it_depends_on() -> None:
    native = ids("1", str(PLACES))
    assert len(native) > 1900
    assert native == ids("0", str(PLACES))


def test_a_million_places_do_not_collide() -> None:
    regions = [mix(digest("region", i), i) for i in range(100)]
    sites = [(digest("code", i // 50) + (i % 50 + 1) * SITE_STEP) & MASK for i in range(100)]
    places = [mix(region, site) for region in regions for site in sites]
    ids = {mix(place, occurrence) for place in places for occurrence in range(110)}
    assert len(ids) == 1_100_000
    assert len({op_id & 0xFFFFFFFFFFFF for op_id in ids}) > 1_099_990  # 48 bits: 0.002 expected
    assert len({op_id >> 16 for op_id in ids}) > 1_099_990


def test_every_bit_of_a_value_reaches_half_the_bits_of_what_follows() -> None:
    start = mix(digest("start"), 12345)
    for bit in range(64):
        changed = mix(mix(start, 1 << bit), 7) ^ mix(mix(start, 0), 7)
        assert 5 <= changed.bit_count() <= 59


def test_the_order_of_steps_matters() -> None:
    assert mix(mix(1, 2), 3) != mix(mix(1, 3), 2)


def test_a_digest_tells_parts_apart_and_is_the_same_everywhere() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("conv2d") == digest("conv2d")
    assert digest("amanda", 1) == digest("amanda", "1")
    assert digest("relu") == 0x9173A5FD8892AFC1


def test_code_is_told_by_its_place_not_by_its_instance() -> None:
    source = "def f():\n    return g()\n"
    code, same = compile(source, "file.py", "exec"), compile(source, "file.py", "exec")
    moved, renamed = compile("\n" + source, "file.py", "exec"), compile(source, "other.py", "exec")
    assert code_hash(code) == code_hash(same)
    assert len({code_hash(code), code_hash(moved), code_hash(renamed)}) == 3


def test_the_instructions_of_one_call_stand_for_one_place() -> None:
    code = compile("f(x) + f(y)", "file.py", "eval")
    first = memoryview(first_instructions(code)).cast("I") if first_instructions(code) else []
    assert len(first) in (0, len(code.co_code) // 2)
    assert all(word <= i for i, word in enumerate(first))
    if first:
        assert 4 <= len(set(first)) < len(first)


def test_the_longest_root_tells_the_kind_of_code() -> None:
    changes: list[int] = []
    registry = CodeRegistry(lambda: changes.append(1))
    registry.add_root("/site/torch/", FRAMEWORK)
    registry.add_root("/site/torch/utils/checkpoint.py", FRAMEWORK | SKIPPED)
    registry.add_root("/site/torch/", FRAMEWORK)
    assert len(changes) == 2

    def kind(name: str) -> int:
        return registry.kind(compile("0", name, "eval"))

    assert kind("/site/torch/nn.py") == FRAMEWORK
    assert kind("/site/torch/utils/checkpoint.py") == FRAMEWORK | SKIPPED
    assert kind("/home/user.py") == 0
    code = compile("0", "/home/user.py", "eval")
    registry.add_code(code, SKIPPED)
    registry.add_code(code, SKIPPED)
    assert registry.kind(code) == SKIPPED
    assert len(changes) == 3


class Subject:
    """Something that can be referenced weakly."""


@contextmanager
def deaths() -> Iterator[list[int]]:
    from amanda.interceptor import codes
    from amanda.plan.lifetime import parameter_slots, plan_lifetimes

    gc.collect()
    heard: list[int] = []
    interceptor.configure(codes.describe, heard.append)
    try:
        yield heard
    finally:
        interceptor.configure(codes.describe, plan_lifetimes.on_death, parameter_slots.record)


def test_ordinals_grow_and_are_not_given_again() -> None:
    with deaths() as heard:
        subject, later = Subject(), Subject()
        first, second = interceptor.ordinal(subject), interceptor.ordinal(later)
        assert (interceptor.ordinal(subject), interceptor.ordinal(later)) == (first, second)
        assert second == first + 1
        del subject
        gc.collect()
        assert heard == [first]
        assert [interceptor.ordinal(Subject()) for _ in range(5)] == [second + i for i in range(1, 6)]
        assert heard == [first, *range(second + 1, second + 6)]
        assert interceptor.ordinal(later) == second


def test_an_ordinal_leaves_nothing_on_the_object() -> None:
    subject = Subject()
    before = dir(subject), sys.getrefcount(subject)
    interceptor.ordinal(subject)
    assert (dir(subject), sys.getrefcount(subject)) == before
    assert vars(subject) == {}


class Unreferable:
    """An object to which no weak reference is possible."""

    __slots__ = ("size",)


@pytest.mark.parametrize("make", [Unreferable, lambda: [1], lambda: int("9" * 30), dict])
def test_two_objects_without_weak_references_have_two_ordinals(make: Callable[[], Any]) -> None:
    plain, later = make(), make()
    numbers = interceptor.ordinal(plain), interceptor.ordinal(later)
    assert 0 < numbers[0] < numbers[1]
    assert (interceptor.ordinal(plain), interceptor.ordinal(later)) == numbers


def test_an_object_without_weak_references_is_dropped_once_nothing_else_holds_it() -> None:
    with deaths() as heard:
        objects = Unreferable()
        number = interceptor.ordinal(objects)
        numbers = {interceptor.ordinal(Unreferable()) for _ in range(1000)}
        assert len(numbers) == 1000
        assert len(heard) > 800
        assert interceptor.ordinal(objects) == number


def test_many_objects_without_weak_references_keep_their_ordinals() -> None:
    objects = [Unreferable() for _ in range(500)]
    numbers = [interceptor.ordinal(item) for item in objects]
    assert len(set(numbers)) == 500
    assert [interceptor.ordinal(item) for item in objects] == numbers


def test_many_objects_come_and_go() -> None:
    with deaths() as heard:
        subjects = [Subject() for _ in range(3000)]
        numbers = [interceptor.ordinal(subject) for subject in subjects]
        assert len(set(numbers)) == 3000
        del subjects[::2]
        gc.collect()
        assert sorted(heard) == numbers[::2]
        assert [interceptor.ordinal(subject) for subject in subjects] == numbers[1::2]


def test_code_without_positions_is_served() -> None:
    assert first_instructions(types.SimpleNamespace()) == b""  # type: ignore[arg-type]
