"""Callbacks for the moment when a framework has been imported, without importing it."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from operator import attrgetter
from types import ModuleType
from typing import Any

logger = logging.getLogger("amanda")

Callback = Callable[[], object]


def is_imported(name: str) -> bool:
    """Return True if a module has been imported and its body has run to the end."""
    return name in sys.modules and (not _is_body_running(name) or name in _watch.finished_here)


def missing_names(names: Iterable[str]) -> list[str]:
    """Import the modules of some names; return the names that do not exist.

    Args:
        names: Module and path of attributes: "package.module:Class.method".
    """
    return [name for name in names if not _can_be_imported(name)]


def lazy_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package, which imports the module of a name when the name is used.

    Args:
        package: `__name__` of the package.
        homes: Module of each name, below the package.
    """

    def import_name(name: str) -> Any:
        """Return a name of the package; raise AttributeError if it has none of that name."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return import_name


def when_imported(name: str, callback: Callback) -> Callable[[], object]:
    """Call `callback` once, when the module has been imported; now if it is imported already.

    Otherwise the callback runs on the thread that imports, after the module's body, where its exceptions are
    logged; a callback that is called now raises its exception here.  While no module is watched,
    sys.meta_path is as before.

    Args:
        name: Name of the module.
        callback: Function without arguments.

    Returns:
        A function that cancels the watch.
    """
    return _watch.add(name, callback)


def _can_be_imported(name: str) -> bool:
    """Import the module of a name; return True if the module exists and has the attributes of the path."""
    module_name, _, attribute_path = name.partition(":")
    try:
        attrgetter(attribute_path)(importlib.import_module(module_name))
    except (ImportError, AttributeError):
        return False
    return True


def _is_body_running(name: str) -> bool:
    # importlib sets `_initializing` while the body runs; a module that was made by hand has no spec, and is
    # complete.
    return bool(getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False))


class _FinishedModules(threading.local):
    """Names of the modules whose callbacks run on this thread: their bodies have run to the end."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.names


class _Watch(MetaPathFinder):
    """Finds a watched module as the other finders do, and calls its callbacks once it has been executed.

    It is in sys.meta_path while a module is watched.
    """

    def __init__(self) -> None:
        # `_initializing` still says of them that their bodies run.
        self.finished_here = _FinishedModules()
        self._lock = threading.RLock()
        self._callbacks_by_module: dict[str, list[Callback]] = {}
        self._original_path: list[MetaPathFinder] = []  # sys.meta_path, while `_path_with_watch` replaces it
        self._path_with_watch: list[MetaPathFinder] = []

    def add(self, name: str, callback: Callback) -> Callable[[], object]:
        """Watch a module; return the function that cancels the watch.  See `when_imported`.

        If another thread runs the module's body now, a new thread waits for its end and calls the callbacks.
        """

        # A function of its own for each watch, because one callback may watch a module twice.
        def callback_of_watch() -> None:
            callback()

        def cancel() -> bool:
            return self._remove(name, callback_of_watch)

        try:
            with self._lock:
                if not self._callbacks_by_module:
                    self._install()
                self._callbacks_by_module.setdefault(name, []).append(callback_of_watch)
            # Looked at after the watch is in place: an import on another thread may end at any moment.
            if is_imported(name):
                was_waiting = cancel()  # False if that import has called it
                if was_waiting:
                    callback()
            elif name in sys.modules:  # another thread runs its body
                threading.Thread(target=self._wait_for_import, args=(name,), daemon=True).start()
        except BaseException:
            cancel()
            raise
        return cancel

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the finders behind this one find; its loader will call the callbacks.

        None for a module that is not watched.
        """
        finders = list(sys.meta_path)
        if fullname not in self._callbacks_by_module or self not in finders:
            return None
        finders_behind = finders[finders.index(self) + 1 :]  # those in front had their turn
        for finder in finders_behind:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    self._call_after_execution(spec.loader, fullname)
                return spec
        return None

    def _call_after_execution(self, loader: Loader, name: str) -> None:
        """Make a loader call a module's callbacks after it has executed the module, once.

        Shadows `exec_module` on the instance, so that the loader keeps its type.  Logs a warning for a loader
        that does not allow this.
        """
        original_exec_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            """Stand-in for the loader's method: removes itself, runs the module, calls its callbacks."""
            vars(loader).pop("exec_module", None)
            original_exec_module(module)
            if name in sys.modules:  # as itself, or as the object that the body has put in its place
                self._call_callbacks(name)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            logger.warning("the import of %s cannot be watched: its loader is %r", name, loader)

    def _call_callbacks(self, name: str) -> None:
        """Call the callbacks of a module and remove them; log their exceptions."""
        self.finished_here.names.add(name)
        try:
            for callback in self._pop_callbacks(name):
                try:
                    callback()
                # It would end the program's import, which has nothing to do with the callback.
                except Exception:
                    logger.exception("what was to happen after the import of %s failed", name)
        finally:
            self.finished_here.names.discard(name)

    def _wait_for_import(self, name: str) -> None:
        """Wait for an import that began before the watch; on a thread of its own, which holds no locks."""
        try:
            importlib.import_module(name)
        except BaseException:  # the thread that imports gets the exception; the next attempt is watched
            return
        self._call_callbacks(name)

    def _pop_callbacks(self, name: str) -> list[Callback]:
        """Remove and return the callbacks of a module, which is no longer watched."""
        with self._lock:
            callbacks = self._callbacks_by_module.pop(name, [])
            self._uninstall_if_idle()
        return callbacks

    def _remove(self, name: str, callback: Callback) -> bool:
        """Remove a callback; return True if it was there, so that it has not been called."""
        with self._lock:
            callbacks = self._callbacks_by_module.get(name, [])
            other_callbacks = [entry for entry in callbacks if entry is not callback]
            if other_callbacks:
                self._callbacks_by_module[name] = other_callbacks
            else:
                self._callbacks_by_module.pop(name, None)
            self._uninstall_if_idle()
        return len(other_callbacks) < len(callbacks)

    def _install(self) -> None:
        # A list of its own, because another thread may be walking the old one.
        self._original_path = sys.meta_path  # type: ignore[assignment]
        self._path_with_watch = sys.meta_path = [self, *self._original_path]  # type: ignore[assignment]

    def _uninstall_if_idle(self) -> None:
        """Put the original sys.meta_path back if no module is watched; keep finders added meanwhile."""
        if self._callbacks_by_module or not self._path_with_watch:
            return
        if sys.meta_path is self._path_with_watch:
            other_finders = [finder for finder in self._path_with_watch if finder is not self]
            if other_finders != self._original_path:  # the program has changed the list meanwhile
                self._original_path[:] = other_finders
            sys.meta_path = self._original_path  # type: ignore[assignment]
        else:  # the program has replaced the list, and may put ours back
            # sys.meta_path is None at the interpreter's end, when generators with open scopes are closed.
            for finders in (sys.meta_path or [], self._path_with_watch):
                if self in finders:
                    finders.remove(self)
        self._original_path, self._path_with_watch = [], []


_watch = _Watch()
