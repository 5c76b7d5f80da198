"""The interceptor on builtins of the standard library: every kind, and nothing left behind."""

from __future__ import annotations

import array
import bisect
import contextlib
import contextvars
import csv
import ctypes
import datetime
import functools
import gc
import io
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import children
import pytest

from amanda import interceptor
from amanda.interceptor import ACTIVATION, Activation, Detour, PlanTable, Site, Suspension, _fallback
from amanda.interceptor.opid import digest

native_only = pytest.mark.xfail(
    not interceptor.NATIVE, reason="never: builtins are not placed without native code", run=False
)

NOARGS, ONE, VARARGS, KEYWORDS, FAST, FAST_KEYWORDS = 0x4, 0x8, 0x1, 0x3, 0x80, 0x82
CONVENTION = 0x1 | 0x2 | 0x4 | 0x8 | 0x80 | 0x200

Numbers = array.array


class Calls:
    """Handles the calls of a site by making them, and keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.ids: list[int] = []

    def __call__(
        self, state: Any, plan: Any, op_id: int, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.seen.append((args, dict(kwargs)))
        self.ids.append(op_id)
        return site.invoke(args, kwargs)


def site_of(target: Any, handler: Callable[..., Any], flags: int = 0) -> Site:
    name = getattr(target, "__name__", str(target))
    return Site(target, target, name, digest("test", name), handler, flags)


@contextmanager
def placed(site: Site, table: PlanTable | None = None) -> Iterator[None]:
    site.place()
    token = ACTIVATION.set(Activation(table, "state"))
    try:
        yield
    finally:
        ACTIVATION.reset(token)
        site.remove()


def convention_of(builtin: Any) -> int:
    """The calling convention in the builtin's method definition."""
    own = ctypes.sizeof(ctypes.c_void_p) * 2
    if isinstance(builtin, type(len)):
        definition = ctypes.c_void_p.from_address(id(builtin) + own).value
    else:
        definition = ctypes.c_void_p.from_address(
            id(builtin) + own + 3 * ctypes.sizeof(ctypes.c_void_p)
        ).value
    assert definition is not None
    flags = ctypes.c_int.from_address(definition + 2 * ctypes.sizeof(ctypes.c_void_p)).value
    return flags & CONVENTION


class Text(io.StringIO):
    """Rows are written to it."""


NUMBERS = Numbers("d", [3.0, 1.0, 2.0])


def sample_array() -> Any:
    return Numbers("d", [3.0, 1.0, 2.0])


CALLS: dict[str, tuple[Any, int, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "function of nothing": (os.getpid, NOARGS, lambda: ((), {})),
    "function of one": (math.sin, ONE, lambda: ((0.5,), {})),
    "function of a tuple": (time.gmtime, VARARGS, lambda: ((86400,), {})),
    "function of a tuple and keywords": (
        csv.reader, KEYWORDS, lambda: ((["a;b"],), {"delimiter": ";"}),
    ),
    "function of an array": (math.gcd, FAST, lambda: ((12, 18, 30), {})),
    "function of an array and keywords": (math.isclose, FAST_KEYWORDS, lambda: ((1.0, 2.0), {"abs_tol": 3})),
    "method of nothing": (Numbers.tolist, NOARGS, lambda: ((sample_array(),), {})),
    "method of one": (Numbers.count, ONE, lambda: ((sample_array(), 1.0), {})),
    "method of a tuple and keywords": (
        dict.update, KEYWORDS, lambda: (({}, {"a": 1}), {"b": 2}),
    ),
    "method of an array": (Numbers.index, FAST, lambda: ((sample_array(), 2.0), {})),
    "method of an array and keywords": (
        bytes.split, FAST_KEYWORDS, lambda: ((b"a b c",), {"maxsplit": 1}),
    ),
    "class method of one": (vars(bytes)["fromhex"], ONE, lambda: ((bytes, "ff00"), {})),
    "class method of an array": (vars(dict)["fromkeys"], FAST, lambda: ((dict, "ab", 1), {})),
    "class method of a tuple and keywords": (
        vars(datetime.datetime)["fromtimestamp"], KEYWORDS,
        lambda: ((datetime.datetime, 86400.0), {"tz": datetime.timezone.utc}),
    ),
}  # fmt: skip


def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if type(target).__name__ == "classmethod_descriptor":
        return getattr(args[0], target.__name__)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def plainly(value: Any) -> Any:
    return list(value) if type(value).__name__ == "reader" else value


@native_only
@pytest.mark.parametrize("kind", CALLS)
def test_calls_of_every_convention_reach_the_handler_and_come_back(kind: str) -> None:
    target, convention, given = CALLS[kind]
    # From 3.15 on, datetime has no class method of a tuple.
    assert convention_of(target) == convention or (sys.version_info >= (3, 15) and convention == KEYWORDS)
    plain = plainly(call(target, *given()))
    calls = Calls()
    with placed(site_of(target, calls)):
        results = [plainly(call(target, *given())) for _ in range(3)]
    assert results == [plain] * 3
    assert len(calls.seen) == 3
    args, kwargs = given()
    assert calls.seen[0][1] == kwargs
    assert len(calls.seen[0][0]) == len(args)
    assert plainly(call(target, *given())) == plain
    assert len(calls.seen) == 3


@native_only
@pytest.mark.parametrize("kind", CALLS)
def test_a_builtin_is_what_it_was_while_placed_and_after(kind: str) -> None:
    target, _, _ = CALLS[kind]
    site = site_of(target, Calls())
    before = (hash(target), repr(target), target.__doc__, target.__name__, site.address)
    known = {target: "value"}
    with placed(site):
        assert site.placed
        assert site.address != before[-1]
        assert known[target] == "value"
        assert (hash(target), repr(target), target.__doc__, target.__name__) == before[:-1]
        assert target in known
        assert target == target
    assert not site.placed
    assert (hash(target), repr(target), target.__doc__, target.__name__, site.address) == before


@native_only
@pytest.mark.parametrize("kind", CALLS)
def test_an_exception_of_the_builtin_passes(kind: str) -> None:
    target, _, given = CALLS[kind]
    args, _ = given()
    bad = (*args, *[object()] * 9)
    with pytest.raises(Exception) as plain:  # noqa: PT011
        call(target, bad, {})
    with placed(site_of(target, Calls())), pytest.raises(type(plain.value)) as placed_error:
        call(target, bad, {})
    assert str(placed_error.value) == str(plain.value)


@native_only
@pytest.mark.parametrize("kind", CALLS)
def test_an_exception_of_the_handler_passes_and_interception_goes_on(kind: str) -> None:
    target, _, given = CALLS[kind]

    def handler(*_: Any) -> Any:
        raise ZeroDivisionError("the handler's own")

    with placed(site_of(target, handler)):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="the handler's own"):
                call(target, *given())


@native_only
@pytest.mark.parametrize("kind", CALLS)
def test_reference_counts_are_flat(kind: str) -> None:
    target, _, given = CALLS[kind]
    args, kwargs = given()
    count = 100_000 // len(CALLS)

    def handler(state: Any, plan: Any, op_id: int, site: Site, args: Any, kwargs: Any) -> Any:
        return site.invoke(args, kwargs)

    for table in (PlanTable(), None):
        site = site_of(target, handler)

        def run(table: Any = table, site: Site = site) -> None:
            for _ in range(count // 2):
                call(target, args, kwargs)
                if table is not None and not len(table):
                    table.set(1, None)

        with placed(site, table):
            run()
            watched = [*args, *kwargs.values(), target, handler, site, site.key, table, None]
            gc.collect()
            before = [sys.getrefcount(one) for one in watched], sys.getallocatedblocks()
            run()
            gc.collect()
            after = [sys.getrefcount(one) for one in watched], sys.getallocatedblocks()
        assert all(abs(new - old) < 50 for new, old in zip(after[0], before[0], strict=True))
        assert abs(after[1] - before[1]) < 500


@native_only
def test_an_op_with_an_empty_plan_does_not_reach_the_handler() -> None:
    calls, table = Calls(), PlanTable()
    with placed(site_of(math.sin, calls), table):
        for i in range(5):
            math.sin(0.5)
            if i == 1:
                for op_id in calls.ids:
                    table.set(op_id, None)
                interceptor.reset_root()
    assert len(calls.seen) < 5


@native_only
@pytest.mark.parametrize(
    "way",
    [
        lambda f: f(3.0),
        lambda f: f(*(3.0,)),
        lambda f: next(map(f, [3.0])),
        lambda f: functools.partial(f, 3.0)(),
        lambda f: operator.call(f, 3.0) if hasattr(operator, "call") else f(3.0),
        lambda f: max([3.0], key=f) and f(3.0),
    ],
)
@pytest.mark.parametrize("target", [math.sqrt, math.log])
def test_a_call_is_seen_however_it_is_made(target: Any, way: Callable[[Any], Any]) -> None:
    plain, calls = way(target), Calls()
    with placed(site_of(target, calls)):
        assert way(target) == plain
    assert calls.seen


@native_only
@pytest.mark.parametrize(
    "hot",
    [
        lambda: math.sin(0.5),
        lambda: math.gcd(4, 6),
        lambda: math.isclose(1.0, 2.0),
        lambda: os.getpid(),
        lambda: time.gmtime(5),
        lambda: b"a b".split(),
        lambda: NUMBERS.count(1.0),
        lambda: NUMBERS.tolist(),
        lambda: NUMBERS.index(1.0),
        lambda: bytes.fromhex("ff"),
    ],
)
def test_a_call_that_the_interpreter_has_specialised_is_seen(hot: Callable[[], Any]) -> None:
    targets = (
        math.sin, math.gcd, math.isclose, os.getpid, time.gmtime, bytes.split, Numbers.count, Numbers.tolist,
        Numbers.index, vars(bytes)["fromhex"],
    )  # fmt: skip
    plain = hot()
    for _ in range(2000):
        hot()
    calls = Calls()
    sites = [site_of(target, calls) for target in targets]
    with contextlib.ExitStack() as stack:
        for site in sites:
            stack.enter_context(placed(site))
        for _ in range(2000):
            assert hot() == plain
    assert len(calls.seen) == 2000
    for _ in range(2000):
        hot()
    assert len(calls.seen) == 2000


@native_only
def test_an_instance_made_before_calls_the_stub() -> None:
    bound, calls = sample_array().count, Calls()
    with placed(site_of(Numbers.count, calls)):
        assert bound(1.0) == 1
    assert len(calls.seen) == 1


@native_only
def test_reads_of_a_property_are_seen_and_writes_are_not() -> None:
    calls = Calls()
    error = OSError()
    target = vars(io.BytesIO)["closed"]
    site = site_of(target, calls)
    address = site.address
    with placed(site):
        stream = io.BytesIO()
        assert stream.closed is False
        assert target.__get__(stream) is False
        assert io.BytesIO.closed is target
    assert len(calls.seen) == 2
    assert calls.seen[0] == ((stream,), {})
    assert site.address == address
    cause = vars(BaseException)["__traceback__"]
    with placed(site_of(cause, calls)):
        error.__traceback__ = None
        assert len(calls.seen) == 2
        assert error.__traceback__ is None
    assert len(calls.seen) == 3


@native_only
def test_subscripts_are_seen_also_those_of_subclasses() -> None:
    class Heir(array.array):  # type: ignore[type-arg]
        pass

    calls, numbers, heir = Calls(), sample_array(), Heir("d", [7.0, 8.0])
    site = site_of(vars(array.array)["__getitem__"], calls)
    address = site.address
    with placed(site):
        assert numbers[1] == 1.0
        assert list(numbers[1:]) == [1.0, 2.0]
        assert heir[-1] == 8.0
        assert operator.getitem(numbers, 0) == 3.0
        with pytest.raises(IndexError):
            numbers[9]
    assert len(calls.seen) == 5
    assert calls.seen[0] == ((numbers, 1), {})
    assert site.address == address
    assert numbers[1] == 1.0
    assert len(calls.seen) == 5


FOLDERS = [str(Path(file).parent) for file in (__file__, children.__file__)]

ASSIGNMENT = """
import array, sys
sys.path[:0] = sys.argv[1:]
from test_interceptor import Calls, placed, site_of
calls, numbers = Calls(), array.array("d", [1.0, 2.0, 3.0])
with placed(site_of(vars(array.array)["__setitem__"], calls)):
    numbers[0] = 5.0
    numbers[1:] = array.array("d", [6.0, 7.0])
    del numbers[0]
    try:
        numbers[9] = 1.0
    except IndexError:
        print("IndexError")
numbers[0] = 8.0
print(len(calls.seen), calls.seen[0][0][1:], list(numbers))
"""


@native_only
def test_assignments_by_subscript_are_seen_and_deletions_pass() -> None:
    done = children.run([sys.executable, "-c", ASSIGNMENT, *FOLDERS])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["IndexError", "3 (0, 5.0) [8.0, 7.0]"]


@native_only
def test_other_threads_and_contexts_are_not_intercepted() -> None:
    calls = Calls()
    with placed(site_of(math.sin, calls)):
        thread = threading.Thread(target=math.sin, args=(0.5,))
        thread.start()
        thread.join()
        contextvars.Context().run(math.sin, 0.5)
        with Suspension():
            math.sin(0.5)
        assert calls.seen == []
        math.sin(0.5)
    assert len(calls.seen) == 1


@native_only
def test_an_inactive_activation_intercepts_nothing() -> None:
    calls, site = Calls(), site_of(math.sin, Calls())
    site = site_of(math.sin, calls)
    site.place()
    activation = Activation(None, "state", False)
    token = ACTIVATION.set(activation)
    try:
        math.sin(0.5)
        activation.active = True
        math.sin(0.5)
        assert interceptor.active() is activation
    finally:
        ACTIVATION.reset(token)
        site.remove()
    assert len(calls.seen) == 1
    assert interceptor.active() is None


@native_only
def test_many_threads_call_at_once() -> None:
    calls = Calls()
    with placed(site_of(math.sin, calls)):
        here = contextvars.copy_context()

        def work() -> None:
            contextvars.Context.copy(here).run(lambda: [math.sin(0.5) for _ in range(2000)])

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls.seen) == 8000


@native_only
def test_what_is_no_callable_cannot_be_intercepted() -> None:
    with pytest.raises(TypeError, match="not a kind of callable"):
        site_of(3, Calls())
    with pytest.raises(TypeError, match="not a kind of callable"):
        site_of(vars(int)["__add__"], Calls())


@native_only
def test_a_placed_builtin_is_not_detoured_and_a_function_is_not_placed() -> None:
    with pytest.raises(TypeError, match="placed, not detoured"):
        Detour(site_of(math.sin, Calls()))
    with pytest.raises(TypeError, match="detoured, not placed"):
        site_of(bisect.insort if not isinstance(bisect.insort, type(len)) else sample_array, Calls()).place()


class Plain:
    """A class whose method is detoured."""

    def double(self, number: float) -> float:
        """Twice the number."""
        return 2 * number


@contextmanager
def detoured(calls: Calls, flags: int = 0) -> Iterator[None]:
    original = vars(Plain)["double"]
    Plain.double = Detour(site_of(original, calls, flags))  # type: ignore[method-assign]
    token = ACTIVATION.set(Activation(PlanTable(), "state"))
    try:
        yield
    finally:
        ACTIVATION.reset(token)
        Plain.double = original  # type: ignore[method-assign]


def test_a_detour_binds_and_looks_like_what_it_stands_for() -> None:
    calls, plain = Calls(), Plain()
    with detoured(calls):
        assert plain.double(2) == 4
        assert Plain.double(plain, number=3) == 6
        assert Plain.double.__doc__ == "Twice the number."
        assert Plain.double.__name__ == "double"
        assert Plain.double.__module__ == Plain.__module__
    assert calls.seen == [((plain, 2), {}), ((plain,), {"number": 3})]


def test_an_op_inside_another_of_its_name_is_a_part_of_it() -> None:
    calls = Calls()

    class Recursive:
        def down(self, n: int) -> int:
            return self.down(n - 1) if n else 0

    original = Recursive.down
    Recursive.down = Detour(site_of(original, calls))  # type: ignore[method-assign]
    token = ACTIVATION.set(Activation(None, "state"))
    try:
        Recursive().down(5)
    finally:
        ACTIVATION.reset(token)
    assert len(calls.seen) == 1


def test_plans_are_kept_by_id() -> None:
    table = PlanTable()
    ids = [digest("plan", i) for i in range(1000)]
    for op_id in ids:
        table.set(op_id, {"id": op_id})
    assert len(table) == 1000
    assert all(table.get(op_id) == {"id": op_id} for op_id in ids)
    for op_id in ids[::2]:
        table.discard(op_id)
    table.discard(12345)
    assert len(table) == 500
    assert table.get(ids[0]) is NotImplemented
    assert table.get(ids[1]) == {"id": ids[1]}
    table.set(ids[1], None)
    assert table.get(ids[1]) is None
    table.clear()
    assert len(table) == 0


def test_a_table_lets_its_plans_go() -> None:
    class Plan:
        pass

    table, plan = PlanTable(), Plan()
    before = sys.getrefcount(plan)
    for op_id in range(1, 100):
        table.set(op_id, plan)
        table.set(op_id, plan)
    del table
    gc.collect()
    assert sys.getrefcount(plan) == before


FALLBACK = """
import datetime, io, sys
sys.path[:0] = sys.argv[1:]
from test_interceptor import Calls, site_of
from amanda import interceptor
from amanda.interceptor import ACTIVATION, Activation, Detour
assert not interceptor.NATIVE
class Stream(io.BytesIO):
    pass
class Date(datetime.date):
    pass
calls = Calls()
Stream.closed = Detour(site_of(vars(io.BytesIO)["closed"], calls))
Date.fromordinal = Detour(site_of(vars(datetime.date)["fromordinal"], calls))
ACTIVATION.set(Activation(None, "state"))
print(Stream().closed, Date.fromordinal(1), type(Date.fromordinal(1)) is Date, len(calls.seen))
"""


def test_the_fallback_stands_in_for_properties_and_class_methods() -> None:
    done = children.run(
        [sys.executable, "-c", FALLBACK, *FOLDERS],
        env={**os.environ, "AMANDA_NATIVE": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "0001-01-01", "True", "3"]


def test_native_code_and_the_fallback_both_define_the_whole_face() -> None:
    from amanda.interceptor import _fallback

    face = {name for name in interceptor.__all__ if name in vars(_fallback)}
    others = {
        "CHECKS", "IMPLEMENTATION", "NATIVE", "ONE_PLACE", "REASON", "TRANSPARENT", "codes", "uninterrupted"
    }  # fmt: skip
    for_boot = {"modules", "disturb_with", "Probe", "probe_functions", "walked_frames"}
    assert set(interceptor.__all__) - face <= others
    assert not interceptor.NATIVE or set(interceptor._names) - for_boot == face - others


def test_a_resumption_has_the_same_fields_on_both_interceptors() -> None:
    fields = _fallback.Resumption._fields
    assert all(hasattr(interceptor.Resumption, field) for field in fields)
    values: Any = ("plan", 1, None, NotImplemented, [2])
    for kind in (interceptor.Resumption, _fallback.Resumption):
        resumption: Any = kind(*values) if kind is _fallback.Resumption else kind(values)
        assert [getattr(resumption, field) for field in fields] == list(values) == list(resumption)
