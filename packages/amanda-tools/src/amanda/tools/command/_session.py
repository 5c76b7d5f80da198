"""A process under `amanda run`: its scope, from its beginning to its end."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import amanda
from amanda.plugins import hookimpl, plugin_manager
from amanda.tools.command._gathering import Gathering
from amanda.tools.command._launch import before_exec
from amanda.tools.command._processes import Handed, Rank, is_rank, process_label
from amanda.tools.command._saving import GRACE, Saving
from amanda.tools.command._spec import ToolSpec, made
from amanda.tools.command._tracebacks import show_program_alone
from amanda.tools.select import leave_construction

_MESSAGES = 1000


class Session:
    """Tools of their own, applied to all that this process does; `finish` closes the scope and tells."""

    def __init__(self, handed: Handed) -> None:
        self._handed = handed
        self._pid = os.getpid()
        self._saw_op = False
        self._leaving = threading.RLock()
        self._rank: Rank | None = None
        self.saving: Saving | None = None
        self._tools = made(ToolSpec(name, given) for name, given in handed.tools)
        for tooling in self._tools:
            if not handed.construction and tooling.phase is None:
                leave_construction(tooling.tool)
        compiled: Any = handed.compiled
        self.scope = amanda.apply(*(tooling.tool for tooling in self._tools), compiled=compiled)

    def begin(self) -> None:
        """Open the scope."""
        self._label = process_label(self._handed)
        self._messages = Messages()
        if self._handed.together and self._pid == self._handed.root:
            self._rank = Rank(self._handed.folder, self._label)
        plugin_manager().register(self)
        self.scope.start()
        if self._handed.every is not None or is_rank(self._label):
            self.listen()

    def listen(self) -> None:
        """Start the thread that saves results, and that hears signals."""
        if os.name == "posix" and self.saving is None:
            self.saving = Saving(self._save, self._handed.every)
            self.saving.start()

    @hookimpl
    def amanda_op_analysed(self, context: amanda.OpContext) -> None:
        """Note that there is something to tell."""
        self._saw_op = True

    def finish(self) -> None:
        """Close the scope; leave the results for the root process, or gather and tell them. Once."""
        if self._pid != os.getpid() or self.scope.closed:
            return
        try:
            if self.saving is not None:
                self.saving.end()
            # No longer than that: it may wait for a routine that the signal has interrupted here.
            self._leaving.acquire(timeout=GRACE)
            self.scope.stop()
            unmatched = {text for tooling in self._tools for text in tooling.tool.unmatched()}
            messages = [one for one in self._messages.told if not one.endswith(tuple(unmatched))]
            self._tell_or_leave(Gathering(self._handed, self._tools, messages, self._label))
        except Exception as error:  # the program's own end is not ours to change
            say(f"amanda: the results of process {self._pid} are lost: {type(error).__name__}: {error}")

    def _tell_or_leave(self, gathering: Gathering) -> None:
        if self._rank is not None:
            self._rank.end(lambda: gathering.leave(self._saw_op), lambda: gathering.tell(saw_op=False))
        elif self._pid == self._handed.root:
            gathering.tell(self._saw_op)
        elif self._saw_op or is_rank(self._label):  # of a rank, also that it has none
            gathering.leave(self._saw_op)

    def leave_to_follower(self) -> Callable[[], None]:
        """Leave the results for the program that this process becomes; return what takes them back."""
        if self._pid != os.getpid() or self.scope.closed or not self._saw_op:
            return lambda: None
        with self._leaving:
            gathering = Gathering(self._handed, self._tools, self._messages.told, self._label)
            left = gathering.leave(followed=True)
        return lambda: left.unlink(missing_ok=True) if left is not None else None

    def _save(self) -> None:
        """Leave the results as they are so far."""
        with self._leaving:
            if self._saw_op and not self.scope.closed:
                messages = list(self._messages.told)
                Gathering(self._handed, self._tools, messages, self._label).leave(ended=False)


class Messages(logging.Handler):
    """Messages that Amanda logs, as of ops that could not be instrumented; they are told at the end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []
        logger = logging.getLogger("amanda")
        logger.handlers[:] = [one for one in logger.handlers if not isinstance(one, Messages)]
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message, once."""
        message = record.getMessage()
        if message not in self.told and len(self.told) < _MESSAGES:
            self.told.append(message)


class _Process:
    """The session of this process, which has another after a fork."""

    session: Session | None = None
    _ending = False
    _waiting: int | None = None

    def __init__(self) -> None:
        self._held: list[set[int]] = []  # what was blocked before each fork that is under way

    def open(self) -> None:
        """Begin, and end with the process."""
        self._begin()
        show_program_alone()
        atexit.register(self._end_of_interpreter)
        before_exec(self._leave_before_exec)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._hold_signals,
                after_in_parent=self._let_signals_through,
                after_in_child=self._begin_in_child,
            )
        if threading.current_thread() is threading.main_thread():
            if self.session is not None and self.session.saving is not None:
                self.session.saving.receive_signals(self._end_by_signal)
            for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._end_by_signal)

    def _begin(self) -> None:
        try:
            self.session = Session(Handed.get())
            self.session.begin()
        except Exception as error:
            say(f"amanda: no tools in process {os.getpid()}: {error}")

    def _hold_signals(self) -> None:
        """Keep signals that end a process waiting: Python forgets one that a child gets as it begins.

        Without tools the child would die of it, as a worker may of a pool that is terminated early.
        """
        self._held.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP}))

    def _let_signals_through(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.pop())

    def _begin_in_child(self) -> None:
        self._let_signals_through()
        if self.session is not None and self.session.saving is not None:
            self.session.saving.ignore_signals()
        self._begin()
        # Its processes end without what `atexit` has; what it clears in a child is registered after that.
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, _Process._end_with_multiprocessing)

    def _end_with_multiprocessing(self) -> None:
        sys.modules["multiprocessing.util"].Finalize(None, self._end, exitpriority=-100)
        if self.session is not None and threading.current_thread() is threading.main_thread():
            self.session.listen()  # a pool terminates its workers as they wait for its locks
            if self.session.saving is not None:
                self.session.saving.receive_signals(self._end_by_signal)

    def _end(self) -> None:
        if self.session is None:
            return
        self._ending = True
        self.session.finish()
        self._ending = False
        if self._waiting is not None:
            _die(self._waiting)

    def _leave_before_exec(self, under_tools: bool) -> Callable[[], None]:
        if self.session is not None and under_tools:
            return self.session.leave_to_follower()
        self._end()
        return lambda: None

    def _end_of_interpreter(self) -> None:
        self._end()
        if getattr(sys, "last_type", None) is KeyboardInterrupt:
            # Python dies of SIGINT after one that nothing caught, if it ran no text since: tell it again.
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def _end_by_signal(self, number: int, frame: FrameType | None) -> None:
        if self._ending:  # as of a worker that is terminated while it exits
            self._waiting = number
            return
        self._end()
        _die(number)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def open_session() -> None:
    """Put this process under the tools that its environment names."""
    _Process().open()


def say(text: str) -> None:
    """Write a line to standard error, if it is there."""
    try:
        sys.stderr.write(f"{text}\n")
    except (OSError, ValueError, AttributeError):
        return
