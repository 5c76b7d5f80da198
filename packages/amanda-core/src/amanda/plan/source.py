"""The place in the user's program that calls an op."""

from __future__ import annotations

import sys
from pathlib import Path

import amanda.interceptor as interceptor
from amanda.interceptor.opid import BOUNDARY, FRAMEWORK, SKIPPED, CodeRegistry

codes = CodeRegistry(lambda: interceptor.forget_code())
"""Which code belongs to a framework, makes enclosing calls, or leaves no mark: drivers tell it."""
codes.add_root(str(Path(__file__).parents[1]) + "/", SKIPPED)
codes.add_root(str(Path(__file__).parents[1] / "testing") + "/", 0)  # a program like the user's


def user_source() -> str:
    """ "file:line" of the innermost frame that is neither a framework's nor Amanda's."""
    frame = sys._getframe(1)
    while frame is not None:
        if not codes.kind(frame.f_code) & (FRAMEWORK | BOUNDARY | SKIPPED):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
