"""A process that becomes another program: what was counted before `os.exec*` is not lost."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from amanda.tools.command._environment import VARIABLE
from amanda.tools.command._launch import is_python


def before_exec(leave: Callable[[bool], Callable[[], None]]) -> None:
    """Call `leave` whenever this process is about to become another program.

    leave: is told whether the program will be under the tools; gives a function that takes back what was
        left, which is called where the system refuses.
    """
    for name in ("execv", "execve"):  # which the others of their family call
        setattr(os, name, _leaving(getattr(os, name), leave))


def _leaving(original: Callable[..., Any], leave: Callable[[bool], Callable[[], None]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute(path: Any, argv: Any, *env: Any) -> Any:
        take_back = leave(_stays(path, *env)) if _can_be_run(path) else None
        try:
            return original(path, argv, *env)
        except BaseException:
            if take_back is not None:
                take_back()
            raise

    return execute


def _can_be_run(path: Any) -> bool:
    try:
        return Path(os.fsdecode(path)).is_file() and os.access(path, os.X_OK)
    except TypeError:  # an open file, by its number
        return True


def _stays(path: Any, env: Mapping[Any, Any] = os.environ) -> bool:
    """Return whether a program is one of Python's that begins with the tools of this environment."""
    try:
        return any(os.fsdecode(name) == VARIABLE for name in env) and is_python(Path(os.fsdecode(path)))
    except (TypeError, OSError, AttributeError):
        return False
