"""Tracebacks of the program's own errors, without the frames of Amanda between the program and its op."""

from __future__ import annotations

import linecache
import re
import sys
import threading
from pathlib import Path
from types import TracebackType

import amanda

_HOMES = tuple(f"{Path(path)}/" for path in amanda.__path__)
_CALL_OF_OP = re.compile(r"\b(invoke|original|call|run|__wrapped__)\(")


def show_program_alone() -> None:
    """Remove Amanda's frames from the tracebacks of exceptions that nothing caught."""
    before = sys.excepthook
    before_in_thread = threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        strip(error)
        before(kind, error, error.__traceback__)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            strip(args.exc_value)
            trace = args.exc_value.__traceback__
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, trace, args.thread))
        before_in_thread(args)

    sys.excepthook = hook
    threading.excepthook = thread_hook


def strip(error: BaseException | None) -> None:
    """Remove Amanda's frames from an exception that an op raised, and from its causes.

    Exceptions of tools and of Amanda itself keep the frames; interrupts lose them wherever they were raised.
    """
    visited: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in visited:
            continue
        visited.add(id(link))
        interrupt = isinstance(link, KeyboardInterrupt)
        notes = getattr(link, "__notes__", [])
        if interrupt and notes:
            notes[:] = [note for note in notes if not note.startswith("[amanda]")]
        if interrupt or not any(note.startswith("[amanda]") for note in notes):
            link.__traceback__ = _without_our_frames(link.__traceback__, interrupt)
        waiting += [
            link.__cause__,
            link.__context__,
            *getattr(link, "exceptions", ()),
        ]


def _without_our_frames(trace: TracebackType | None, all_of_ours: bool) -> TracebackType | None:
    remaining: list[TracebackType] = []
    ours: list[TracebackType] = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_HOMES):
            ours.append(trace)
        else:
            remaining += [] if all_of_ours or _calls_op(ours) else ours
            remaining.append(trace)
            ours = []
        trace = trace.tb_next
    remaining += [] if all_of_ours or _calls_op(ours) else ours
    for frame, after in zip(remaining, [*remaining[1:], None], strict=False):
        frame.tb_next = after
    return remaining[0] if remaining else None


def _calls_op(frames: list[TracebackType]) -> bool:
    """Return True if the last frame calls the op itself."""
    if not frames:
        return False
    code = frames[-1].tb_frame.f_code
    return bool(_CALL_OF_OP.search(linecache.getline(code.co_filename, frames[-1].tb_lineno)))
