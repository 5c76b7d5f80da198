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
        facts: list[Any] = [
            (link.filename, link.lineno) for link in frames if not link.filename.startswith(OWN)
        ][-1:]
        link: BaseException | None = error
        while link is not None:
            cause = link.__cause__
            facts += [type(link).__qualname__, _text(link), getattr(link, "__notes__", []), cause is None]
            link = cause or (None if link.__suppress_context__ else link.__context__)
        return facts
    raise AssertionError("it does not fail")


def _text(error: BaseException) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", str(error))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
@pytest.mark.parametrize("program", FAILING, ids=lambda program: program.__name__)
def test_an_error_is_told_as_without_a_tool(program: Callable[[], None], harmless: amanda.Tool) -> None:
    bare = failure(program)
    with amanda.apply(harmless):
        for _ in range(3):
            assert failure(program) == bare
    assert failure(program) == bare
    assert not interceptor.active()
