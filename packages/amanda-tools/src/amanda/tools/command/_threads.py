"""Threads that a program starts belong to its scope."""

from __future__ import annotations

import threading
from typing import Any

import amanda


def carry_to_threads(scope: amanda.Scope) -> None:
    """Let every thread that is started from now on run in an open scope, until it closes."""
    start: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    threading.Thread._bootstrap_inner = scope.bind(start)  # type: ignore[attr-defined]
