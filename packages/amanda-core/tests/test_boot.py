"""The self-test of the native interceptor: what it runs, and what comes of a failure."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import children
import pytest

from amanda import interceptor
from amanda.interceptor import boot

native_only = pytest.mark.xfail(
    not interceptor.NATIVE, reason="never: the pure-Python interceptor reads no structures", run=False
)


@pytest.fixture
def face() -> dict[str, Any]:
    """Return the names of the native interceptor."""
    return dict(interceptor._names)


@pytest.fixture(autouse=True)
def configured() -> Any:
    """Set again what the checks replace."""
    yield
    from amanda.plan.lifetime import parameter_slots, plan_lifetimes

    interceptor.configure(interceptor.codes.describe, plan_lifetimes.on_death, parameter_slots.record)


@native_only
def test_the_checks_pass_and_are_counted(face: dict[str, Any]) -> None:
    assert boot.check_interpreter(face) == interceptor.CHECKS > 10


@native_only
@pytest.mark.skipif(sys.version_info < (3, 11), reason="bytecode is specialised from 3.11 on")
def test_stubs_are_reached_from_specialised_bytecode(face: dict[str, Any]) -> None:
    specialised = []
    for name, _, call in boot._probes(face):
        for _ in range(boot._CALLS):
            call()
        code: Any = call.__code__  # type: ignore[attr-defined]
        if code._co_code_adaptive != code.co_code:
            specialised.append(name)
    assert {"a function of one argument", "a function of an array"} <= set(specialised)
    assert {"a method of one argument", "a method of an array"} <= set(specialised)


@native_only
def test_a_stub_that_is_not_reached_is_named(face: dict[str, Any]) -> None:
    def site(*arguments: Any) -> Any:
        return type("Unplaced", (), {"place": lambda self: None, "remove": lambda self: None})()

    expected = "of 64 calls of a function of nothing its stub is reached by 0"
    with pytest.raises(AssertionError, match=expected):
        boot._check_stub(face | {"Site": site}, *next(boot._probes(face)))


def _without_the_second(walk: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
    return lambda most: [*walk(most)[:1], *walk(most)[2:]]


@native_only
def test_other_frames_than_those_of_python_are_an_error(face: dict[str, Any]) -> None:
    face["walked_frames"] = _without_the_second(face["walked_frames"])
    with pytest.raises(ImportError, match=r"fails its self-test on CPython 3.*native code walks the frames"):
        boot.check_interpreter(face)


@native_only
@pytest.mark.slow
def test_python_intercepts_where_the_checks_fail() -> None:
    program = """
import sys, types
stand_in = types.ModuleType("amanda.interceptor.boot")
def check_interpreter(face):
    raise ImportError("it fails its self-test")
stand_in.check_interpreter = check_interpreter
sys.modules["amanda.interceptor.boot"] = stand_in
from amanda import interceptor
print(interceptor.NATIVE, interceptor.REASON)
"""
    done = children.run([sys.executable, "-c", program])
    assert done.stdout == "False the native interceptor cannot be loaded: it fails its self-test\n"
