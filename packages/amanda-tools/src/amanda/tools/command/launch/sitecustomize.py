"""Module that Python imports at its start under `amanda run`, which puts this folder on PYTHONPATH.

Most processes never import a framework, so this module is cheap: it imports a little of the standard library,
and the rest of Amanda only where a process opens its scope.
"""

from __future__ import annotations

import _thread
import atexit
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from functools import wraps

TYPE_CHECKING = False  # as typing has it, whose import takes longer than all others here
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

    from amanda.tools.command._session import Session

_CONTEXTVARS = "contextvars"
# Modules before whose import the scope opens, besides frameworks: contexts, tasks, frameworks for tests, and
# models, which are made with tools disabled.
_OPENING_MODULES = (_CONTEXTVARS, "asyncio", "amanda.testing", "amanda.tools.models._loaders")


class Process:
    """One process under `amanda run`: it opens the scope in time, and acts at signals and its end.

    A scope covers the context in which it opens, and the threads and tasks that start later.  So the scope
    opens before the first framework is imported, before the first thread starts, and before the import of
    `contextvars`, without which no program makes a task.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        # None until the scope opens, and without amanda-tools.
        self.session: Session | None = None
        self._settings = settings
        self._opening_imports = {*settings["frameworks"], *_OPENING_MODULES}
        self._is_scope_pending = True
        # is_ending: while `end` runs, in which a signal is kept in `_pending_signal`.
        self._has_listeners = self._is_ending = self._has_failed = False
        self._pending_signal: int | None = None
        self._signal_masks: list[set[int]] = []  # the signals that were blocked before each fork under way
        # Module or class, name, replacement and original, until the scope opens.
        self._replaced_functions: list[tuple[Any, str, Any, Any]] = []

    @property
    def _is_root(self) -> bool:
        return bool(os.getpid() == self._settings["root"])

    def begin(self) -> None:
        """Open the scope at once in a rank, or where a framework is loaded; elsewhere when it is needed.

        In the root also note how the program exits, and have `end` called as the interpreter ends.
        """
        # Other ranks wait for a rank.  Elsewhere the scope is needed before a framework is imported, before a
        # thread starts, and in the root before `exec`.
        if self._is_root:
            self._watch_exit()
        if (self._is_root and self._settings["is_rank"]) or not self._opening_imports.isdisjoint(sys.modules):
            self.open_scope()
            return
        if self._is_root:
            os.environ.setdefault("AMANDA_PROCESS", "main")  # so that other processes know that they are not
            self.watch_end()
            for name in ("execv", "execve"):
                self._open_before(os, name)
        self._open_before(threading.Thread, "start")
        for name in ("start_new_thread", "start_new"):
            self._open_before(_thread, name)
        sys.meta_path.insert(0, self)  # `find_spec` is asked first for every import

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Open the scope before the import of a framework; return the framework's spec, None for others."""
        if fullname not in self._opening_imports or (fullname == _CONTEXTVARS and "amanda" in sys.modules):
            return None  # while the program imports Amanda, no scope can be opened
        self.open_scope()
        if fullname in sys.modules:  # the module of a tool has imported it
            return _spec_of_loaded(fullname)
        for finder in list(sys.meta_path):  # opening may have changed the list
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find else None
            if spec is not None:
                return spec
        return None

    def _open_before(self, holder: Any, name: str) -> None:
        """Replace a function by one that opens the scope first; the open scope puts the function back."""
        original = getattr(holder, name, None)
        if original is None:
            return

        @wraps(original)
        def open_then_call(*args: Any, **kwargs: Any) -> Any:
            """Open the scope, then call what is in the function's place."""
            if not self._is_scope_pending:  # somebody kept a reference to this function
                return original(*args, **kwargs)
            self.open_scope()
            return getattr(holder, name)(*args, **kwargs)

        setattr(holder, name, open_then_call)
        self._replaced_functions.append((holder, name, open_then_call, original))

    def _watch_exit(self) -> None:
        """Replace `sys.exit` by a function that notes if the status is an error, as of wrong arguments."""
        sys_exit = sys.exit

        @wraps(sys_exit)
        def note_and_exit(*status: Any) -> Any:
            """Note the status, then raise SystemExit."""
            self._has_failed = bool(status and status[0])
            return sys_exit(*status)

        sys.exit = note_and_exit

    def _restore_functions(self) -> None:
        """Put back the functions and the import hook that wait for the first framework, thread or task."""
        self._is_scope_pending = False
        for holder, name, replacement, original in self._replaced_functions:
            # Something else may have replaced the function since, and keeps its own.
            if getattr(holder, name) is replacement:
                setattr(holder, name, original)
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def open_scope(self) -> None:
        """Once: put functions back, open the session, watch the end; or print that amanda-tools is absent."""
        if not self._is_scope_pending:
            return
        self._restore_functions()
        try:
            from amanda.tools.command._session import Session
        except ImportError as error:
            is_absent = (error.name or "").startswith("amanda")
            reason = f"{sys.executable} does not have amanda-tools" if is_absent else error
            _print_lines(f"no tools in process {os.getpid()}: {reason}")
            return
        self.session = Session(self)
        self.session.open()
        self.watch_end()

    def watch_end(self) -> None:
        """Have `end` called as the interpreter ends, and by signals without a handler, which forks delay."""
        # Called again in a forked child, which inherits listeners and has no signal handlers.
        if not self._has_listeners:
            self._has_listeners = True
            atexit.register(self._end_of_interpreter)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(
                    before=self._hold_signals, after_in_parent=self._let_signals_through,
                    after_in_child=self._begin_in_child,
                )  # fmt: skip
        self._replace_handlers(signal.SIG_DFL, self.end_by_signal)

    def _replace_handlers(self, present_handler: Any, new_handler: Any) -> None:
        """On the main thread, set a new handler for SIGTERM and SIGHUP where they have the present one."""
        if threading.current_thread() is threading.main_thread():
            # Windows has no SIGHUP: SIGTERM is then looked at twice.
            for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
                if signal.getsignal(number) == present_handler:
                    signal.signal(number, new_handler)

    def _hold_signals(self) -> None:
        """Block SIGTERM and SIGHUP in a fork: Python loses a signal that a child receives as it begins."""
        # Without tools the signal would end the child, such as a worker of a pool that is terminated early.
        self._signal_masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP}))

    def _begin_in_child(self) -> None:
        """Unblock signals in a forked child; until the child has run an op, they end it at once."""
        # There is nothing to save, and a handler in Python may come too late to end a lock's wait.
        self._replace_handlers(self.end_by_signal, signal.SIG_DFL)
        self._let_signals_through()

    def _let_signals_through(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._signal_masks.pop())

    def end_before_traceback(self) -> None:
        """Call `end` before the traceback that ends the process is printed, so that the error comes last."""
        self._has_failed = True
        self.end()

    def end(self) -> None:
        """Close the scope, and write or print the results; then obey a signal that came in the meantime."""
        # A root without a scope prints the results of other processes, or that there was no op.
        self._is_ending = True
        if self.session is not None:
            self.session.finish(self._has_failed)
        elif self._is_root and self._is_scope_pending:
            self._restore_functions()
            self._report_other_processes()
        self._is_ending = False
        if self._pending_signal is not None:
            _end_by_signal(self._pending_signal)

    def _report_other_processes(self) -> None:
        """Print the results of other processes; without any, remove their folder, and say that no op ran."""
        try:
            # Only an empty folder can be removed.
            os.rmdir(self._settings["folder"])  # noqa: PTH106
        except OSError:  # other processes have written results
            from amanda.tools.command._gathering import report_other_processes
            from amanda.tools.command._processes import RunSettings

            report_other_processes(RunSettings.get())
        else:
            # An exception that nothing caught is on the screen already.
            if not (self._settings["quiet"] or self._has_failed or getattr(sys, "last_type", None)):
                _print_lines(*self._settings["no_op_texts"])

    def _end_of_interpreter(self) -> None:
        """Call `end` as the interpreter ends; after a KeyboardInterrupt the process still dies of SIGINT."""
        self.end()
        if getattr(sys, "last_type", None) is KeyboardInterrupt:
            # Python dies of SIGINT after one that nothing caught, if it ran no text since: tell it again.
            with suppress(KeyboardInterrupt):
                exec("raise KeyboardInterrupt")

    def end_by_signal(self, number: int, frame: FrameType | None) -> None:
        """Call `end`, then end the process by a signal; while `end` runs already, leave the signal to it."""
        if self._is_ending:  # a worker that is terminated while it exits
            self._pending_signal = number
            return
        self.end()
        _end_by_signal(number)


class _LoadedModule:
    """Loader of a module that is there already: a second execution of a framework's module raises errors."""

    def __init__(self, module: Any) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: Any) -> Any:
        return self._module

    def exec_module(self, module: Any) -> None:
        """Give the module its own spec again."""
        module.__spec__ = self._spec


def _spec_of_loaded(name: str) -> Any:
    """Give the module of a name in `sys.modules` a spec with which an import takes it as it is; return it."""
    from importlib.machinery import ModuleSpec

    module: Any = sys.modules[name]
    loader: Any = _LoadedModule(module)
    # The import prefers the module's own spec to what a finder returns, and would execute the module again.
    module.__spec__ = ModuleSpec(name, loader, is_package=hasattr(module, "__path__"))
    return module.__spec__


def _end_by_signal(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _print_lines(*texts: str) -> None:
    """Write lines to standard error, after what the program wrote to standard output."""
    with suppress(OSError, ValueError, AttributeError):  # the reader has gone, or the shell has closed it
        sys.stdout.flush()
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("".join(f"amanda: {text}\n" for text in texts))
        sys.stderr.flush()


def _begin_process() -> None:
    """Begin the process under its tools; the program does not see the folder of this module on sys.path."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib is not loaded yet
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]  # noqa: PTH100
    Process(json.loads(os.environ["AMANDA_TOOLS"])).begin()


def _import_hidden_sitecustomize() -> None:
    """Import the program's own sitecustomize, which this module hides."""
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


# A process that cleared the variable runs without tools.
if os.environ.get("AMANDA_TOOLS"):
    _begin_process()
# Last: the program's own module may start threads, which belong to the scope.
_import_hidden_sitecustomize()
