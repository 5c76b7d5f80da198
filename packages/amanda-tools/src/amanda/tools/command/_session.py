"""One process under `amanda run`: its scope, results that are saved early, later programs, tracebacks."""

from __future__ import annotations

import linecache
import logging
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import amanda
from amanda.errors import AmandaError
from amanda.plugins import hookimpl, plugin_manager
from amanda.tools.command._gathering import Printer, ProcessResults
from amanda.tools.command._processes import VARIABLE, Rank, RunSettings, is_python, is_rank, process_label
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
        # Before the scope opens, so that no analysed op is missed.
        plugin_manager().register(self)
        self._begin()
        show_program_alone(before=self._process.fail)
        before_exec(self._write_before_exec)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_in_child)  # after the core leaves it
        if threading.current_thread() is threading.main_thread():
            self._receive_signals()
        self._follow_multiprocessing()
        if (module := sys.modules.get("multiprocessing.process")) and module.parent_process() is not None:
            self._end_with_multiprocessing()

    def _begin(self) -> None:
        """Make the tools and apply them; an error is told, and the program runs without tools."""
        try:
            self._start(RunSettings.get())
        except Exception as error:
            Printer().say(f"no tools in process {os.getpid()}: {error}")

    def _start(self, settings: RunSettings) -> None:
        """Make the tools, apply them, and hold the lock of a rank.

        Signals are heard where results are saved at intervals, and in ranks.
        """
        tools = settings.toolings()
        # Tools without a selected phase leave out the construction of models, unless it is asked for.
        for tooling in tools:
            if not settings.construction and tooling.phase is None:
                leave_construction(tooling.tool)
        compiled: Any = settings.compiled
        self._scope = amanda.apply(*(tooling.tool for tooling in tools), compiled=compiled)
        self._settings, self._pid, self._saw_op, self._saving = settings, os.getpid(), False, None
        self._writing_lock = threading.RLock()
        self._label = process_label(settings)
        messages = Messages(settings.quiet, self._label)
        self._results = ProcessResults(settings, tools, messages.texts, self._label)
        self._has_failed = False
        self._rank: Rank | None = None
        # Rank takes the lock, before the scope opens: no other rank may print while this one runs.
        if settings.together and self._pid == settings.root:
            self._rank = Rank(settings.folder, self._label)
        self._scope.start()
        # A launcher kills ranks that wait in native code, where no handler in Python runs.
        if settings.every is not None or is_rank(self._label):
            self._listen()

    def _listen(self) -> None:
        """Start the thread that saves results and receives signals."""
        if os.name == "posix" and self._saving is None:
            self._saving = Saving(self._save, self._settings.every)
            self._saving.start()

    def _receive_signals(self) -> None:
        """Have the thread that saves watch the signals that end the process, if there is one."""
        if self._saving is not None:
            self._saving.watch_signals(self._process.end_by_signal)

    @hookimpl
    def amanda_op_analysed(self, context: amanda.OpContext) -> None:
        """Note that an op ran under the tools, so that there are results, which signals must not end."""
        if not self._saw_op:
            self._saw_op = True
            self._process.listen()

    def _is_closed(self) -> bool:
        """Return True if this process has no open scope of its own."""
        # After a fork the scope is that of the parent until the child has made tools of its own.
        return self._pid != os.getpid() or self._scope.closed

    @classmethod
    def present(cls) -> Session | None:
        """Return the session of this process; None outside of `amanda run`."""
        return next((plugin for plugin in plugin_manager().get_plugins() if isinstance(plugin, cls)), None)

    @property
    def label(self) -> str:
        """Name of the process: "main", "rank0", "rank0.process123"."""
        return self._label

    @property
    def sees_construction(self) -> bool:
        """True if tools see the ops that construct models too."""
        return self._settings.construction

    def silence(self) -> None:
        """Print no results, of a program that has failed and says why."""
        self._results.is_quiet = True

    def finish(self, failed: bool = False) -> None:
        """Close the scope once; write the results for the root process, or print those of all processes.

        failed: whether an error ends the program, which then need not be told that it executed no op.
        """
        if self._is_closed():
            return
        try:
            if failed and not self._saw_op:
                self.silence()
            if self._saving is not None:
                self._saving.end()
            # No longer than that: it may wait for a routine that the signal has interrupted here.
            self._writing_lock.acquire(timeout=GRACE)
            self._scope.stop()
            self._report_or_write()
        except Exception as error:  # the program's own end is not ours to change
            Printer().say(f"the results of process {self._pid} are lost: {type(error).__name__}: {error}")

    def _report_or_write(self) -> None:
        """Print the results in the root and in the last rank; write them into a file elsewhere."""
        if self._rank is not None:
            self._rank.end(partial(self._results.write, self._saw_op), partial(self._results.report, False))
        elif self._pid == self._settings.root:
            self._results.report(self._saw_op)
        elif self._saw_op or is_rank(self._label):  # of a rank, also that it has none
            self._results.write(self._saw_op)

    def _save(self) -> None:
        """Write the present results for the root process; if that fails, the next time tries again."""
        with self._writing_lock:
            if self._saw_op and not self._is_closed():
                try:
                    self._results.write(ended=False)
                except Exception as error:
                    if not self._has_failed:
                        logger.warning("the results so far were not saved: %s; the next save retries", error)
                    self._has_failed = True

    def _write_before_exec(self, under_tools: bool) -> Callable[[], None]:
        """Write the results before `exec` replaces this program; return a function that withdraws them.

        under_tools: whether the next program runs under the tools, and gathers results.
        """
        results_file = None
        if not under_tools:
            self._process.end()
        elif not self._is_closed() and self._saw_op:
            with self._writing_lock:
                results_file = self._results.write(followed=True)
        return lambda: results_file.unlink(missing_ok=True) if results_file is not None else None

    def _begin_in_child(self) -> None:
        """Begin a session in a forked child, with tools of its own."""
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
        """Close the scope as a process of multiprocessing ends, after its other finalizers."""
        sys.modules["multiprocessing.util"].Finalize(None, self._process.end, exitpriority=-100)
        if self._scope is not None and threading.current_thread() is threading.main_thread():
            self._listen()  # a pool terminates its workers as they wait for its locks
            self._receive_signals()


class Messages(logging.Handler):
    """Log handler that collects warnings of Amanda, such as ops that could not be instrumented.

    A record with an attribute `live`, such as the first NaN, is printed at once.
    texts: the other messages, each once, which the end of the process prints.
    """

    def __init__(self, quiet: bool, label: str) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._quiet = quiet
        # A run of one process has no use for its label.
        self._prefix = f"{label}: " if label.startswith("rank") else ""
        logger = logging.getLogger("amanda")
        # A forked child has inherited the handler of its parent, whose messages are not its own.
        logger.handlers[:] = [handler for handler in logger.handlers if not isinstance(handler, Messages)]
        logger.addHandler(self)
        # Else the program's root logger would print what the end of the process tells.
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a message that is new; print one that is live."""
        message = record.getMessage()
        if getattr(record, "live", False):
            Printer(self._quiet).say(f"{self._prefix}{message}")
        elif message not in self.texts and len(self.texts) < _MESSAGES:
            self.texts.append(message)


def before_exec(write: Callable[[bool], Callable[[], None]]) -> None:
    """Call `write` whenever `exec` is about to replace the program of this process.

    write: takes True if the next program runs under the tools; returns a function that withdraws its results.
    """

    def execute(original: Callable[..., Any], path: Any, argv: Any, *env: Any) -> Any:
        """Write the results, then replace the program; withdraw them if that fails."""
        withdraw = write(_keeps_tools(path, *env)) if _can_be_run(path) else None
        try:
            return original(path, argv, *env)
        except BaseException:
            if withdraw is not None:
                withdraw()
            raise

    for name in ("execv", "execve"):  # which the others of the family call
        setattr(os, name, partial(execute, getattr(os, name)))


def _can_be_run(path: Any) -> bool:
    """Return True for an executable file, by its path or by the number of an open file."""
    try:
        return Path(os.fsdecode(path)).is_file() and os.access(path, os.X_OK)
    except TypeError:  # an open file, by its number
        return True


def _keeps_tools(path: Any, env: Mapping[Any, Any] = os.environ) -> bool:
    """Return True if Python runs a program, in an environment that names tools."""
    try:
        return any(os.fsdecode(name) == VARIABLE for name in env) and is_python(Path(os.fsdecode(path)))
    except (TypeError, OSError, AttributeError):
        return False


GRACE = 1.0
"""Seconds without an answer to a signal, after which the main thread is taken to wait in native code."""
_SOON = 0.1
_NO_FD = -1
"""Wakeup descriptor of a program without one, as in `signal.set_wakeup_fd`."""


class Saving(threading.Thread):
    """Thread that calls `save` every so many seconds, and when a signal's handler cannot run.

    A launcher ends a rank that waits for another one in a collective by a signal, and kills the rank some
    seconds later; Python runs handlers on the main thread, which waits.  A signal that arrives just before a
    blocking system call does not interrupt the call, so the thread sends the signal once more.
    """

    def __init__(self, save: Callable[[], None], every: float | None) -> None:
        super().__init__(name="amanda-saving", daemon=True)
        self._save = save
        self._every = every
        self._handler: Any = None
        self._ended = threading.Event()
        self._reading, self._writing = os.pipe()
        # A full pipe must not block the handler in C, which writes while the program stands still.
        os.set_blocking(self._writing, False)

    def watch_signals(self, handler: Any) -> None:
        """Watch a handler's signals, unless the program has a wakeup descriptor; call on the main thread."""
        self._handler = handler
        # A program may have a descriptor of its own, as asyncio has; it gets it back.
        previous_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        if previous_fd != _NO_FD:
            signal.set_wakeup_fd(previous_fd)

    def ignore_signals(self) -> None:
        """Stop watching signals in a forked child, which would notify the thread of its parent."""
        previous_fd = signal.set_wakeup_fd(_NO_FD)
        if previous_fd not in (_NO_FD, self._writing):
            signal.set_wakeup_fd(previous_fd)

    def run(self) -> None:
        """Save at intervals, and for a main thread that answers no signal, until `end`."""
        while not self._ended.is_set():
            ready, _, _ = select.select([self._reading], [], [], self._every)
            arrived = os.read(self._reading, 64) if ready else b""
            ending = set(arrived) & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
            # A byte may be of any signal, or of `end`; a handler in Python is given a moment to end all.
            if ready and (not ending or self._ended.wait(_SOON)):
                continue
            for number in ending:
                main = threading.main_thread().ident
                # A handler of the program's own is not called twice.
                if main is not None and signal.getsignal(number) == self._handler:
                    signal.pthread_kill(main, number)
            # A main thread in native code runs no handler, so the results are saved for it.
            if not self._ended.wait(GRACE if ready else 0):
                # Results are computed with the framework, and are not ops of the program.
                with amanda.disabled():
                    self._save()

    def end(self) -> None:
        self._ended.set()
        # Wakes the thread, which waits in select.
        os.write(self._writing, b"\0")


_HOMES = tuple(f"{Path(path)}/" for path in amanda.__path__)
_TOOLS = tuple(f"{home}tools/" for home in _HOMES)
_CALL_OF_OP = re.compile(r"\b(invoke|original|call|run|__wrapped__)\(")


def show_program_alone(before: Callable[[], None]) -> None:
    """Remove Amanda's frames from the tracebacks of exceptions that nothing caught.

    before: called before the traceback that ends the program, which is the last that it prints.
    """
    previous_hook = sys.excepthook
    previous_thread_hook = threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        strip_traceback(error)
        # A program that calls the hook itself goes on, and so does a prompt after each error.
        if sys._getframe().f_back is None and not hasattr(sys, "ps1"):
            before()
        previous_hook(kind, error, error.__traceback__)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        """Strip the exception of a thread, and hand it to the hook that was there."""
        if args.exc_value is not None:
            strip_traceback(args.exc_value)
            trace = args.exc_value.__traceback__
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, trace, args.thread))
        previous_thread_hook(args)

    sys.excepthook = hook
    threading.excepthook = thread_hook


def strip_traceback(error: BaseException | None) -> None:
    """Remove Amanda's frames from an exception that an op or a routine raised, and from its causes.

    An exception that a tool's own code raised keeps the frames of tools.  Interrupts and errors of Amanda,
    whose messages name the op and the tool, lose all of Amanda's frames.  Others of Amanda itself keep them.
    """
    # Causes and contexts may lead in a circle.
    visited: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in visited:
            continue
        visited.add(id(link))
        notes = getattr(link, "__notes__", [])
        of_tool = any(note.startswith("[amanda]") for note in notes)
        if isinstance(link, KeyboardInterrupt) and notes:
            notes[:] = [note for note in notes if not note.startswith("[amanda]")]
        is_removed: Callable[[list[TracebackType]], bool] = _is_op_call
        if isinstance(link, (KeyboardInterrupt, AmandaError)):
            is_removed = bool
        elif of_tool:
            is_removed = _is_outside_tools
        link.__traceback__ = _without_our_frames(link.__traceback__, is_removed)
        # Causes, contexts and members of exception groups are printed as well.
        waiting += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]


def _without_our_frames(
    trace: TracebackType | None, is_removed: Callable[[list[TracebackType]], bool]
) -> TracebackType | None:
    """Return a traceback without some of Amanda's frames.

    is_removed: called with each frame of Amanda's and the frames after it, up to one that is not Amanda's.
    """
    remaining: list[TracebackType] = []
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for is_ours, run in groupby(frames, lambda frame: frame.tb_frame.f_code.co_filename.startswith(_HOMES)):
        consecutive = list(run)
        remaining += [
            frame for i, frame in enumerate(consecutive) if not (is_ours and is_removed(consecutive[i:]))
        ]
    # A traceback is a linked list, so frames are removed by linking past them.
    for frame, next_frame in zip(remaining, [*remaining[1:], None], strict=False):
        frame.tb_next = next_frame
    return remaining[0] if remaining else None


def _is_outside_tools(frames: list[TracebackType]) -> bool:
    return not frames[0].tb_frame.f_code.co_filename.startswith(_TOOLS)


def _is_op_call(frames: list[TracebackType]) -> bool:
    """Return True if the last frame calls the op itself."""
    # Native code has no frame, so the line that calls the op is the last of ours.
    code = frames[-1].tb_frame.f_code
    return bool(_CALL_OF_OP.search(linecache.getline(code.co_filename, frames[-1].tb_lineno)))
