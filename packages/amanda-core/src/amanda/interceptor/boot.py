"""Self-test of the native interceptor at boot: native code leans on structures that CPython may change.

Calls of every kind of target have to reach their stub, also from bytecode that the interpreter has
specialised. The frames that native code walks have to be those of `sys._getframe`, and an op has to have the
same id whether native code looks the op's place up or walks there.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import Context
from types import FrameType
from typing import Any

from amanda.interceptor.opid import CodeRegistry, digest

_CALLS = 64
"""Calls within which each version of CPython specialises a call, also one whose target has changed."""
_FRAMES = 12
"""Frames that are compared: those of the test, and some of the program that imports Amanda."""

ObjectByName = Mapping[str, Any]
"""The native interceptor: its classes and functions by name."""


def check_interpreter(native_by_name: ObjectByName) -> int:
    """Check that native code fits this interpreter; return the number of checks.

    Raises ImportError that names the check which fails.
    """
    # The empty context keeps the test's activation from the program, and the program's from the test.
    try:
        return Context().run(_run_checks, native_by_name)
    except Exception as error:
        failure = str(error) if isinstance(error, AssertionError) else repr(error)
        raise ImportError(
            f"it fails its self-test on CPython {platform.python_version()}: {failure}"
        ) from error


def _run_checks(native_by_name: ObjectByName) -> int:
    """Configure the interceptor, activate it in this context, and run each check; return how many there are.

    Raises AssertionError at the first check that fails.
    """
    native_by_name["configure"](CodeRegistry(native_by_name["forget_code"]).describe, lambda ordinal: None)
    native_by_name["ACTIVATION"].set(native_by_name["Activation"](None, None))
    _check_frames(native_by_name)
    _check_ids(native_by_name)
    probes = list(_probes(native_by_name))
    for name, target, call in probes:
        _check_stub(native_by_name, name, target, call)
    return 2 + len(probes)


def _probes(native_by_name: ObjectByName) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """Yield, for each kind of callable that a stub may be placed on, a name, a target and a call of it."""
    # By their calling convention.
    without, plain, of_tuple, of_array, of_keywords = native_by_name["probe_functions"]
    yield "a function of nothing", without, lambda: without()
    yield "a function of one argument", plain, lambda: plain(1)
    yield "a function of a tuple", of_tuple, lambda: of_tuple(1)
    yield "a function of an array", of_array, lambda: of_array(1, 2)
    yield "a function of keywords", of_keywords, lambda: of_keywords(1, value=2)
    yield "a function of optional keywords", of_keywords, lambda: of_keywords(1)
    kind, probe = native_by_name["Probe"], native_by_name["Probe"]()
    yield "a method of nothing", kind.without, lambda: probe.without()
    yield "a method of one argument", kind.plain, lambda: probe.plain(1)
    yield "a method of a tuple", kind.tuple, lambda: probe.tuple(1)
    yield "a method of an array", kind.array, lambda: probe.array(1, 2)
    yield "a method of keywords", kind.keywords, lambda: probe.keywords(1, value=2)
    yield "a method of optional keywords", kind.keywords, lambda: probe.keywords(1)
    yield "a property", kind.number, lambda: probe.number
    yield "a subscript", kind.__getitem__, lambda: probe[1]


def _check_stub(native_by_name: ObjectByName, name: str, target: Any, call: Callable[[], object]) -> None:
    """Call a target before, while and after its stub is placed.

    Raises AssertionError unless the stub is reached as often as the target is called while it is placed.
    """
    ids_of_seen_calls: list[int] = []
    site = _recording_site(native_by_name, target, ids_of_seen_calls)
    for _ in range(_CALLS):
        call()
    site.place()
    for _ in range(_CALLS):
        call()
    site.remove()
    call()
    if len(ids_of_seen_calls) != _CALLS:
        raise AssertionError(f"of {_CALLS} calls of {name} its stub is reached by {len(ids_of_seen_calls)}")


def _recording_site(native_by_name: ObjectByName, target: Any, ids: list[int]) -> Any:
    """Return a site whose handler appends the op's id and makes the call."""

    def handler(state: Any, call_cache: Any, op_id: int, site: Any, args: Any, kwargs: Any) -> Any:
        ids.append(op_id)
        return site.invoke(args, kwargs)

    return native_by_name["Site"](target, target, "self-test", digest("self-test"), handler)


def _check_frames(native_by_name: ObjectByName) -> None:
    """Walk frames of each kind; raise AssertionError where native code finds others than Python."""

    def compare() -> int:
        """Compare both walks here; return 0, as `__len__` has to return a number."""
        # The innermost frame is left out: it is at another instruction for each of the two.
        native, public = native_by_name["walked_frames"](_FRAMES)[1:], list(_outer_frames(sys._getframe(1)))
        if native != public:
            raise AssertionError(f"native code walks the frames {native}, and Python {public}")
        return 0

    async def coroutine() -> None:
        compare()

    class Sized:
        def __len__(self) -> int:
            return compare()

    compare()
    for _ in (compare() for _ in range(2)):
        compare()
    with suppress(StopIteration):
        coroutine().send(None)
    # Entered by the interpreter from C.
    len(Sized())
    sorted([1, 2], key=lambda _: compare())
    eval("compare()", {"compare": compare})


def _outer_frames(frame: FrameType | None) -> Iterator[tuple[object, int]]:
    """Yield code and instruction word of frames, from this one outwards."""
    for _ in range(_FRAMES - 1):
        if frame is None:
            return
        yield frame.f_code, frame.f_lasti // 2
        frame = frame.f_back


def _check_ids(native_by_name: ObjectByName) -> None:
    """Run ops at different places; raise AssertionError if places share an id, or ids change with the run."""
    ids: list[int] = []
    op = native_by_name["probe_functions"][1]
    site = _recording_site(native_by_name, op, ids)

    def program() -> None:
        """Call the op ten times: twice in a line, in a loop, in and around a generator, and from C."""
        op(1), op(1)
        for _ in range(2):
            op(1)
        for _ in (op(1) for _ in range(2)):
            op(1)
        list(map(op, range(2)))

    site.place()
    runs = []
    # The first run walks to each op, the others find its place in the cache.
    for _ in range(3):
        program()
        runs.append(ids[:])
        ids.clear()
        native_by_name["reset_root"]()
    site.remove()
    # For each call of the program, the index of the first call with its id.  Outside of modules the rounds of
    # a loop share an id; the generator and the body of the loop over it take turns.
    first_run, expected_first_calls = runs[0], [0, 1, 2, 2, 4, 5, 4, 5, 8, 8]
    first_calls = [first_run.index(op_id) for op_id in first_run]
    if any(run != first_run for run in runs) or first_calls != expected_first_calls:
        raise AssertionError(f"ops at one place have different ids, or the other way round: {runs}")
