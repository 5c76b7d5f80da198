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

_MAX_MESSAGES = 1000


class Session:
    """One process's tools: made and applied by `open`, their results written as the process ends or `exec`s.

    process: tells of the end of the process.  A forked child begins again with tools of its own.
    """

    # The process whose scope is open; None for the scope where the tools could not be made.
    _pid = 0
    _scope: Any = None
    _saving_thread: Saving | None = None

    def __init__(self, process: Process) -> None:
        self._process = process

    def open(self) -> None:
        """Apply the tools, and follow the process: errors, `exec`, forks, signals and multiprocessing."""
        # Before the scope opens, so that no analysed op is missed.
        plugin_manager().register(self)
        self._begin_or_report()
        show_program_alone(before=self._process.end_before_traceback)
        call_before_exec(self._write_before_exec)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_in_child)  # after the core leaves it
        if threading.current_thread() is threading.main_thread():
            self._watch_signals_of_process()
        self._close_in_children_of_multiprocessing()
        if (module := sys.modules.get("multiprocessing.process")) and module.parent_process() is not None:
            self._close_before_multiprocessing_exits()

    def _begin_or_report(self) -> None:
        """Make the tools and apply them; an error is printed, and the program runs without tools."""
        try:
            self._make_and_apply_tools(RunSettings.get())
        except Exception as error:
            Printer().say(f"no tools in process {os.getpid()}: {error}")

    def _make_and_apply_tools(self, settings: RunSettings) -> None:
        """Make the tools of this process, with its label, messages and results, and open their scope."""
        # A rank takes its lock.  In ranks, and for saves at intervals, the thread that saves starts too.
        toolings = settings.toolings()
        # Tools without a selected phase leave out the construction of models, unless it is asked for.
        for tooling in toolings:
            if not settings.construction and tooling.phase is None:
                leave_construction(tooling.tool)
        compiled: Any = settings.compiled
        self._scope = amanda.apply(*(tooling.tool for tooling in toolings), compiled=compiled)
        self._settings, self._pid, self._saw_op, self._saving_thread = settings, os.getpid(), False, None
        self._writing_lock = threading.RLock()
        self._label = process_label(settings)
        messages = Messages(settings.quiet, self._label)
        self._results = ProcessResults(settings, toolings, messages.texts, self._label)
        self._has_save_failed = False
        self._rank: Rank | None = None
        # A rank takes its lock before the scope opens: no other rank may print while this one runs.
        if settings.together and self._pid == settings.root:
            self._rank = Rank(settings.folder, self._label)
        self._scope.start()
        # A launcher kills ranks that wait in native code, where no handler in Python runs.
        if settings.every is not None or is_rank(self._label):
            self._start_saving_thread()

    def _start_saving_thread(self) -> None:
        """Start the thread that saves results and receives signals, on POSIX and once per process."""
        if os.name == "posix" and self._saving_thread is None:
            self._saving_thread = Saving(self._save_present_results, self._settings.every)
            self._saving_thread.start()

    def _watch_signals_of_process(self) -> None:
        """Have the thread that saves watch the signals that end the process, if there is one."""
        if self._saving_thread is not None:
            self._saving_thread.watch_signals(self._process.end_by_signal)

    @hookimpl
    def amanda_op_analysed(self, context: amanda.OpContext) -> None:
        """Note that an op ran under the tools, so that there are results, which signals must not end."""
        if not self._saw_op:
            self._saw_op = True
            self._process.watch_end()

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
        """Print no results at the end: the program has failed and says why."""
        self._results.is_quiet = True

    def finish(self, failed: bool = False) -> None:
        """Close the scope once; write the results for the root process, or print those of all processes.

        failed: whether an error ends the program, which then need not be told that it executed no op.
        Without a scope of this process it does nothing; an error is printed.
        """
        if self._is_closed():
            return
        try:
            if failed and not self._saw_op:
                self.silence()
            if self._saving_thread is not None:
                self._saving_thread.end()
            # A save under way ends first, unless it waits for a routine that the signal interrupted here.
            self._writing_lock.acquire(timeout=GRACE)
            self._scope.stop()
            self._report_or_write()
        except Exception as error:  # the program's own end is not ours to change
            Printer().say(f"the results of process {self._pid} are lost: {type(error).__name__}: {error}")

    def _report_or_write(self) -> None:
        """Print all results in the root, or in the last rank; elsewhere write a file, if there are any."""
        if self._rank is not None:
            write = partial(self._results.write_for_root, self._saw_op)
            self._rank.end(write, report=partial(self._results.report, False))
        elif self._pid == self._settings.root:
            self._results.report(self._saw_op)
        elif self._saw_op or is_rank(self._label):  # a rank without a file would count as killed
            self._results.write_for_root(self._saw_op)

    def _save_present_results(self) -> None:
        """Write results so far, if any, for the root process; log the first failure, and let saves go on."""
        with self._writing_lock:
            if self._saw_op and not self._is_closed():
                try:
                    self._results.write_for_root(ended=False)
                except Exception as error:
                    if not self._has_save_failed:
                        logger.warning("the results so far were not saved: %s; the next save retries", error)
                    self._has_save_failed = True

    def _write_before_exec(self, under_tools: bool) -> Callable[[], None]:
        """Write the results before `exec` replaces this program; return a function that removes their file.

        under_tools: whether the next program runs under the tools, and reports these results.  Otherwise this
        process ends here: it closes the scope and reports, which cannot be undone.
        """
        results_file = None
        if not under_tools:
            self._process.end()
        elif not self._is_closed() and self._saw_op:
            with self._writing_lock:
                results_file = self._results.write_for_root(followed=True)
        return lambda: results_file.unlink(missing_ok=True) if results_file is not None else None

    def _begin_in_child(self) -> None:
        """Begin again in a forked child, with tools of its own; the parent's thread gets no signal of it."""
        if self._saving_thread is not None:
            self._saving_thread.ignore_signals()
        self._begin_or_report()
        self._close_in_children_of_multiprocessing()

    def _close_in_children_of_multiprocessing(self) -> None:
        """Have the scope closed at the end of processes that multiprocessing forks from this one."""
        # It clears finalizers as such a process begins, so ours is registered after that.
        util: Any = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(self, Session._close_before_multiprocessing_exits)

    def _close_before_multiprocessing_exits(self) -> None:
        """Have the scope closed after all finalizers of multiprocessing; save and watch signals till then."""
        # The lowest priority runs last; such a process skips `atexit`.
        sys.modules["multiprocessing.util"].Finalize(None, self._process.end, exitpriority=-100)
        if self._scope is not None and threading.current_thread() is threading.main_thread():
            self._start_saving_thread()  # a pool kills workers that wait for its locks: no finalizer runs
            self._watch_signals_of_process()


class Messages(logging.Handler):
    """Log handler that collects Amanda's warnings, instead of the root logger and a parent process's handler.

    A record with an attribute `live`, such as the first NaN, is printed at once.
    texts: the other messages, such as ops that could not be instrumented, each once, printed at the end.
    """

    def __init__(self, quiet: bool, label: str) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._quiet = quiet
        # A run of one process has no use for its label.
        self._prefix = f"{label}: " if label.startswith("rank") else ""
        # A forked child has inherited the handler of its parent, whose messages are not its own.
        logger.handlers[:] = [handler for handler in logger.handlers if not isinstance(handler, Messages)]
        logger.addHandler(self)
        # Else the program's root logger would print what the end of the process tells.
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a message that is new, up to `_MAX_MESSAGES`; print one that is live."""
        message = record.getMessage()
        if getattr(record, "live", False):
            Printer(self._quiet).say(f"{self._prefix}{message}")
        elif message not in self.texts and len(self.texts) < _MAX_MESSAGES:
            self.texts.append(message)


def call_before_exec(write_results: Callable[[bool], Callable[[], None]]) -> None:
    """Replace `os.execv` and `os.execve` by functions that call `write_results` first if the path can be run.

    write_results: takes True if the next program runs under the tools; returns a function that removes them.
    """

    def replace_program(original: Callable[..., Any], path: Any, argv: Any, *env: Any) -> Any:
        """Write the results, then replace the program; withdraw them if that fails."""
        withdraw_results = write_results(_keeps_tools(path, *env)) if _can_be_run(path) else None
        try:
            return original(path, argv, *env)
        except BaseException:
            if withdraw_results is not None:
                withdraw_results()
            raise

    for name in ("execv", "execve"):  # the others, such as execlp, call these two
        setattr(os, name, partial(replace_program, getattr(os, name)))


def _can_be_run(path: Any) -> bool:
    """Return True if `exec` can run a path; True for every number of an open file."""
    try:
        return Path(os.fsdecode(path)).is_file() and os.access(path, os.X_OK)
    except TypeError:  # an open file, by its number
        return True


def _keeps_tools(path: Any, env: Mapping[Any, Any] = os.environ) -> bool:
    """Return True if Python runs the program at a path, in an environment that names tools."""
    try:
        return any(os.fsdecode(name) == VARIABLE for name in env) and is_python(Path(os.fsdecode(path)))
    except (TypeError, OSError, AttributeError):
        return False


GRACE = 1.0
"""Seconds without an answer to a signal, after which the main thread is taken to wait in native code."""
# Seconds that a handler in Python has to end the process, before its signal is sent to the main thread again.
_HANDLER_DELAY = 0.1
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
        self._save_present_results, self._interval = save, every
        # Of the signals that end the process, as `watch_signals` sets it; None before.
        self._handler: Any = None
        self._ended = threading.Event()
        self._read_end, self._write_end = os.pipe()
        # A full pipe must not block the handler in C, which writes while the program stands still.
        os.set_blocking(self._write_end, False)

    def watch_signals(self, handler: Any) -> None:
        """Have Python wake the thread at each signal, unless the program has a wakeup descriptor."""
        # handler: the handler of the signals that end the process, which the thread may have to call once
        # more.
        self._handler = handler
        # Python writes the number of each signal into one descriptor; a program's own, as of asyncio, stays.
        program_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if program_fd != _NO_FD:
            signal.set_wakeup_fd(program_fd)

    def ignore_signals(self) -> None:
        """Stop watching signals in a forked child, which would notify the thread of its parent."""
        program_fd = signal.set_wakeup_fd(_NO_FD)
        if program_fd not in (_NO_FD, self._write_end):
            signal.set_wakeup_fd(program_fd)

    def run(self) -> None:
        """Until `end`, save at intervals, and where the main thread does not answer a signal that ends it."""
        while not self._ended.is_set():
            # Waits for signals, of which Python writes the numbers as bytes, and for `end`, which writes 0;
            # nothing is readable when the interval has passed.
            readable_fds, _, _ = select.select([self._read_end], [], [], self._interval)
            signal_bytes = os.read(self._read_end, 64) if readable_fds else b""
            ending_signals = set(signal_bytes) & {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
            # A handler in Python is given a moment to end all; other signals are none of ours.
            if readable_fds and (not ending_signals or self._ended.wait(_HANDLER_DELAY)):
                continue
            for number in ending_signals:
                main_thread_id = threading.main_thread().ident
                # A handler of the program's own is not called twice.
                if main_thread_id is not None and signal.getsignal(number) == self._handler:
                    signal.pthread_kill(main_thread_id, number)
            # A main thread in native code runs no handler: once it had its time, the results are saved here.
            if not self._ended.wait(GRACE if readable_fds else 0):
                # Results are computed with the framework, and are not ops of the program.
                with amanda.disabled():
                    self._save_present_results()

    def end(self) -> None:
        self._ended.set()
        # Wakes the thread, which waits in select.
        os.write(self._write_end, b"\0")


_HOMES = tuple(f"{Path(path)}/" for path in amanda.__path__)
_TOOLS_FOLDERS = tuple(f"{home}tools/" for home in _HOMES)
_OP_CALL_SOURCE = re.compile(r"\b(invoke|original|call|run|__wrapped__)\(")


def show_program_alone(before: Callable[[], None]) -> None:
    """Remove Amanda's frames from the tracebacks that Python prints, by hooks on top of the present ones.

    before: called before the traceback that ends the program, which is the last that it prints.
    """
    previous_hook, previous_thread_hook = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Strip an exception, call `before` if it ends the program, and call the hook that was there."""
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

    sys.excepthook, threading.excepthook = hook, thread_hook


def strip_traceback(error: BaseException | None) -> None:
    """Remove Amanda's frames from an exception that an op or a routine raised, its causes and members.

    An exception of a tool's own code keeps the frames of tools.  Interrupts, which lose Amanda's notes too,
    and AmandaErrors, which name op and tool, lose all of Amanda's frames.  Other errors in Amanda keep them.
    """
    # Causes and contexts may lead in a circle.
    visited_ids: set[int] = set()
    exceptions_to_visit = [error]
    while exceptions_to_visit:
        exception = exceptions_to_visit.pop()
        if exception is None or id(exception) in visited_ids:
            continue
        visited_ids.add(id(exception))
        # Amanda adds a note to what a tool raises, which names tool and op.
        notes = getattr(exception, "__notes__", [])
        is_of_tool = any(note.startswith("[amanda]") for note in notes)
        if isinstance(exception, KeyboardInterrupt) and notes:
            notes[:] = [note for note in notes if not note.startswith("[amanda]")]
        may_remove: Callable[[list[TracebackType]], bool] = _is_op_call
        if isinstance(exception, (KeyboardInterrupt, AmandaError)):
            may_remove = bool  # True for every frame of Amanda
        elif is_of_tool:
            may_remove = _is_outside_tools
        exception.__traceback__ = _without_our_frames(exception.__traceback__, may_remove)
        # Causes, contexts and members of exception groups are printed as well.
        members = getattr(exception, "exceptions", ())
        exceptions_to_visit += [exception.__cause__, exception.__context__, *members]


def _without_our_frames(
    trace: TracebackType | None, may_remove: Callable[[list[TracebackType]], bool]
) -> TracebackType | None:
    """Relink a traceback past some of Amanda's frames; return its first frame, None without one.

    may_remove: called with a frame of Amanda and those that follow it up to the next frame of somebody else.
    """
    remaining_frames: list[TracebackType] = []
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    for is_ours, group in groupby(frames, lambda frame: frame.tb_frame.f_code.co_filename.startswith(_HOMES)):
        neighbours = list(group)
        for i, frame in enumerate(neighbours):
            if not (is_ours and may_remove(neighbours[i:])):
                remaining_frames.append(frame)
    # A traceback is a linked list, so frames are removed by linking past them.
    for frame, next_frame in zip(remaining_frames, [*remaining_frames[1:], None], strict=False):
        frame.tb_next = next_frame
    return remaining_frames[0] if remaining_frames else None


def _is_outside_tools(frames: list[TracebackType]) -> bool:  # of the first frame
    return not frames[0].tb_frame.f_code.co_filename.startswith(_TOOLS_FOLDERS)


def _is_op_call(frames: list[TracebackType]) -> bool:
    """Return True if the source line of the last frame calls the op itself."""
    # Native code has no frame, so the line that calls the op is the last of ours.
    code = frames[-1].tb_frame.f_code
    return bool(_OP_CALL_SOURCE.search(linecache.getline(code.co_filename, frames[-1].tb_lineno)))
