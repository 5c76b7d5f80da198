"""The place in the user's program that calls an op."""

from __future__ import annotations

import sys

from amanda.interceptor import codes
from amanda.interceptor.opid import BOUNDARY, FRAMEWORK, SKIPPED


def user_source() -> str:
    """Return "file:line" of the innermost frame that is neither a framework's nor Amanda's."""
    frame = codes.innermost(sys._getframe(1), but=FRAMEWORK | BOUNDARY | SKIPPED)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
