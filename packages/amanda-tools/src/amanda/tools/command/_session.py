"""One process under `amanda run`, from the opening of its scope to its end."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import amanda
from amanda.plugins import hookimpl, plugin_manager
from amanda.tools.command._gathering import Gathering, Teller
from amanda.tools.command._launch import before_exec
from amanda.tools.command._processes import Handed, Rank, is_rank, process_label
from amanda.tools.command._saving import GRACE, Saving
from amanda.tools.command._tracebacks import show_program_alone
from amanda.tools.select import leave_construction

if TYPE_CHECKING:
    from amanda.tools.command.launch.sitecustomize import Process

logger = logging.getLogger("amanda")

_MESSAGES = 1000


class Session:
    """The scope of one process: tools made for the process, and applied until it ends or becomes a program.

    process: tells of the end of the process.  A forked child begins again with tools of its own.
    """

    _pid = 0
    _scope: Any = None
    _saving: Saving | None = None

    def __init__(self, process: Process) -> None:
        self._process = process

    def open(self) -> None:
        """Open the scope."""
        plugin_manager().register(self)
        self._begin()
        show_program_alone()
        before_exec(self._leave_before_exec)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_in_child)  # after the core leaves it
        if threading.current_thread() is threading.main_thread():
            self._receive_signals()
        self._follow_multiprocessing()
        if (module := sys.modules.get("multiprocessing.process")) and module.parent_process() is not None:
            self._end_with_multiprocessing()

    def _begin(self) -> None:
        try:
            self._start(Handed.get())
        except Exception as error:
            Teller().say(f"no tools in process {os.getpid()}: {error}")

    def _start(self, handed: Handed) -> None:
        """Make the tools and apply them."""
        tools = handed.toolings()
        for tooling in tools:
            if not handed.construction and tooling.phase is None:
                leave_construction(tooling.tool)
        compiled: Any = handed.compiled
        self._scope = amanda.apply(*(tooling.tool for tooling in tools), compiled=compiled)
        self._handed, self._pid, self._saw_op, self._saving = handed, os.getpid(), False, None
        self._leaving = threading.RLock()
        self._label = process_label(handed)
        self._gathering = Gathering(handed, tools, Messages().texts, self._label)
        self._has_failed = False
        self._rank: Rank | None = None
        if handed.together and self._pid == handed.root:
            self._rank = Rank(handed.folder, self._label)
        self._scope.start()
        if handed.every is not None or is_rank(self._label):
            self._listen()

    def _listen(self) -> None:
        """Start the thread that saves results and receives signals."""
        if os.name == "posix" and self._saving is None:
            self._saving = Saving(self._save, self._handed.every)
            self._saving.start()

    def _receive_signals(self) -> None:
        if self._saving is not None:
            self._saving.receive_signals(self._process.end_by_signal)

    @hookimpl
    def amanda_op_analysed(self, context: amanda.OpContext) -> None:
        """Note that an op ran under the tools, so that there are results."""
        self._saw_op = True

    def _is_closed(self) -> bool:
        return self._pid != os.getpid() or self._scope.closed

    def finish(self) -> None:
        """Close the scope once; write the results for the root process, or print those of all processes."""
        if self._is_closed():
            return
        try:
            if self._saving is not None:
                self._saving.end()
            # No longer than that: it may wait for a routine that the signal has interrupted here.
            self._leaving.acquire(timeout=GRACE)
            self._scope.stop()
            self._tell_or_leave(self._gathering)
        except Exception as error:  # the program's own end is not ours to change
            Teller().say(f"the results of process {self._pid} are lost: {type(error).__name__}: {error}")

    def _tell_or_leave(self, gathering: Gathering) -> None:
        if self._rank is not None:
            self._rank.end(lambda: gathering.leave(self._saw_op), lambda: gathering.tell(saw_op=False))
        elif self._pid == self._handed.root:
            gathering.tell(self._saw_op)
        elif self._saw_op or is_rank(self._label):  # of a rank, also that it has none
            gathering.leave(self._saw_op)

    def _save(self) -> None:
        """Write the present results for the root process; if that fails, the next time tries again."""
        with self._leaving:
            if self._saw_op and not self._is_closed():
                try:
                    self._gathering.leave(ended=False)
                except Exception as error:
                    if not self._has_failed:
                        logger.warning("results so far are not saved: %s; the next time tries again", error)
                    self._has_failed = True

    def _leave_before_exec(self, under_tools: bool) -> Callable[[], None]:
        """Write the results before `exec` replaces this program; return a function that withdraws them.

        under_tools: whether the next program runs under the tools, and gathers results.
        """
        results_file = None
        if not under_tools:
            self._process.end()
        elif not self._is_closed() and self._saw_op:
            with self._leaving:
                results_file = self._gathering.leave(followed=True)
        return lambda: results_file.unlink(missing_ok=True) if results_file is not None else None

    def _begin_in_child(self) -> None:
        if self._saving is not None:
            self._saving.ignore_signals()
        self._begin()
        self._follow_multiprocessing()

    def _follow_multiprocessing(self) -> None:
        """Have the scope closed at the end of a process of multiprocessing, which skips `atexit`."""
        # It clears finalizers as such a process begins, so ours is registered after that.
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, Session._end_with_multiprocessing)

    def _end_with_multiprocessing(self) -> None:
        sys.modules["multiprocessing.util"].Finalize(None, self._process.end, exitpriority=-100)
        if self._scope is not None and threading.current_thread() is threading.main_thread():
            self._listen()  # a pool terminates its workers as they wait for its locks
            self._receive_signals()


class Messages(logging.Handler):
    """Log handler that collects warnings of Amanda, such as ops that could not be instrumented.

    told: the messages, each once, which the end of the process prints.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logger = logging.getLogger("amanda")
        logger.handlers[:] = [handler for handler in logger.handlers if not isinstance(handler, Messages)]
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a message that is new."""
        message = record.getMessage()
        if message not in self.texts and len(self.texts) < _MESSAGES:
            self.texts.append(message)
