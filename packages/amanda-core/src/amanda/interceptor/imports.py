"""Know when a framework has been imported, without importing it."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType

logger = logging.getLogger("amanda")

Callback = Callable[[], object]


def is_imported(name: str) -> bool:
    """Return True if the module is there and its body has run to the end."""
    return name in sys.modules and (not _under_way(name) or name in _watch.finished_here)


def lacking(names: Iterable[str]) -> list[str]:
    """Import modules; return those of some names that are not there.

    names: module and path of attributes: "package.module:Class.method".
    """
    return [name for name in names if not _is_there(name)]


def when_imported(name: str, callback: Callback) -> Callable[[], object]:
    """Call `callback` once, when the module has been imported; at once if it is already.

    The callback runs on the thread that imports, after the module's body; what it raises there is logged.
    Returns a function that calls the watch off; raises what the callback raises at once, and has called the
    watch off then. While nothing is watched, sys.meta_path is as before.
    """
    return _watch.add(name, callback)


def _is_there(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


def _under_way(name: str) -> bool:
    # importlib sets it while the body runs; a module that was made by hand has no spec, and is complete.
    return bool(getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False))


class _FinishedHere(threading.local):
    """The modules whose callbacks run on this thread: their body has run, though their import goes on."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.names


class _Watch(MetaPathFinder):
    """Finds a watched module as the other finders do, and adds a step to the end of its execution."""

    def __init__(self) -> None:
        self.finished_here = _FinishedHere()
        self._lock = threading.RLock()
        self._callbacks: dict[str, list[Callback]] = {}
        self._before: list[MetaPathFinder] = []  # sys.meta_path, while `_with_us` stands in for it
        self._with_us: list[MetaPathFinder] = []

    def add(self, name: str, callback: Callback) -> Callable[[], object]:
        # A function of its own for each call, because one callback may watch a module twice.
        def once() -> None:
            callback()

        def call_off() -> bool:
            return self._remove(name, once)

        try:
            with self._lock:
                if not self._callbacks:
                    self._install()
                self._callbacks.setdefault(name, []).append(once)
            # Looked at after the watch is in place: an import on another thread may end at any moment.
            if is_imported(name):
                if call_off():
                    callback()
            elif name in sys.modules:
                threading.Thread(target=self._wait, args=(name,), daemon=True).start()
        except BaseException:
            call_off()
            raise
        return call_off

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._callbacks or self not in (finders := list(sys.meta_path)):
            return None
        for finder in finders[finders.index(self) + 1 :]:  # those in front had their turn
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    self._extend(spec.loader, fullname)
                return spec
        return None

    def _extend(self, loader: Loader, name: str) -> None:
        """Shadow `exec_module` on the loader's instance for one execution, so that it keeps its type."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            if name in sys.modules:  # as itself, or as what the body put in its place
                self._fire(name)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            logger.warning("the import of %s cannot be watched: its loader is %r", name, loader)

    def _fire(self, name: str) -> None:
        self.finished_here.names.add(name)
        try:
            for callback in self._take(name):
                try:
                    callback()
                # It would end the program's import, which has nothing to do with what we watch for.
                except Exception:
                    logger.exception("what was to happen after the import of %s failed", name)
        finally:
            self.finished_here.names.discard(name)

    def _wait(self, name: str) -> None:
        """Outwait an import that began before the watch; on a thread, since the waiter may hold locks."""
        try:
            importlib.import_module(name)
        except BaseException:  # told to who imports it; the next try is watched
            return
        self._fire(name)

    def _take(self, name: str) -> list[Callback]:
        with self._lock:
            callbacks = self._callbacks.pop(name, [])
            self._tidy()
        return callbacks

    def _remove(self, name: str, callback: Callback) -> bool:
        """Call a watch off; return whether the callback had not been called."""
        with self._lock:
            waiting = self._callbacks.get(name, [])
            remaining = [entry for entry in waiting if entry is not callback]
            if remaining:
                self._callbacks[name] = remaining
            else:
                self._callbacks.pop(name, None)
            self._tidy()
        return len(remaining) < len(waiting)

    def _install(self) -> None:
        # A list of its own, because another thread may be walking the old one.
        self._before = sys.meta_path  # type: ignore[assignment]
        self._with_us = sys.meta_path = [self, *self._before]  # type: ignore[assignment]

    def _tidy(self) -> None:
        if self._callbacks or not self._with_us:
            return
        if sys.meta_path is self._with_us:
            remaining = [finder for finder in self._with_us if finder is not self]
            if remaining != self._before:
                self._before[:] = remaining
            sys.meta_path = self._before  # type: ignore[assignment]
        else:  # someone put a list in place of ours, and may put ours back
            # None at the interpreter's end, when what is suspended in a scope is let go.
            for finders in (sys.meta_path or [], self._with_us):
                if self in finders:
                    finders.remove(self)
        self._before, self._with_us = [], []


_watch = _Watch()
