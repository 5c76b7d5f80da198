"""Calls of ops that ran in Python at a multiple of the time, as a scope reports them where they are many."""

from __future__ import annotations

from typing import Any

from amanda import interceptor

_MANY = 1000
"""Calls from which on a report names them: a program of fewer does not feel their cost."""


def slow_calls(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Say how many calls ran in Python since some statistics, and why; "" unless they are the most of many.

    The first call of each op and form runs in Python always.
    """
    if not interceptor.NATIVE:
        return ""
    native, learned = (after[name] - before[name] for name in ("native", "learned"))
    python = {reason: number - before["python"].get(reason, 0) for reason, number in after["python"].items()}
    python["new form of call"] = max(0, python.get("new form of call", 0) - learned)
    slow = {reason: number for reason, number in python.items() if number and reason != "new op"}
    total = sum(slow.values())
    if total < max(_MANY, native):
        return ""
    if "new form of call" in slow:
        slow["a form of call that native code cannot learn"] = slow.pop("new form of call")
    why = ", ".join(
        f"{reason} ({number:,})" for reason, number in sorted(slow.items(), key=lambda item: -item[1])
    )
    return (
        f"{total:,} of {total + native:,} calls with routines ran in Python, at a multiple of the time of "
        f"native code: {why}"
    )
