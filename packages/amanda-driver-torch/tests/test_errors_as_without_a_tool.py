"""What a program that fails is told is the same in a scope."""

import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from failing_programs import FAILING

import amanda
from amanda import interceptor

OWN = tuple(amanda.__path__)


def failure(program: Callable[[], None]) -> list[Any]:
    """Return what an error says: its type, text, notes, cause and context, and where it was raised.

    Where an op fails that Python brought to the tools, frames of Amanda's are inside of that.
    """
    try:
        program()
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        told: list[Any] = [(one.filename, one.lineno) for one in frames if not one.filename.startswith(OWN)][
            -1:
        ]
        one: BaseException | None = error
        while one is not None:
            cause = one.__cause__
            told += [type(one).__qualname__, _text(one), getattr(one, "__notes__", []), cause is None]
            one = cause or (None if one.__suppress_context__ else one.__context__)
        return told
    raise AssertionError("it does not fail")


def _text(error: BaseException) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", str(error))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("program", FAILING, ids=lambda one: one.__name__)
def test_an_error_is_told_as_without_a_tool(program: Callable[[], None], harmless: amanda.Tool) -> None:
    bare = failure(program)
    with amanda.apply(harmless):
        for _ in range(3):
            assert failure(program) == bare
    assert failure(program) == bare
    assert not interceptor.active()
