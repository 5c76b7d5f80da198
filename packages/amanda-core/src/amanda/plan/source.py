"""The place in the user's program that calls an op."""

from __future__ import annotations

import sys

from amanda.interceptor.opid import BOUNDARY, FRAMEWORK, SKIPPED
from amanda.interceptor.registry import codes


def user_source() -> str:
    """Return "file:line" of the innermost frame that is neither a framework's nor Amanda's."""
    frame = sys._getframe(1)
    while frame is not None:
        if not codes.kind(frame.f_code) & (FRAMEWORK | BOUNDARY | SKIPPED):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
