"""Attachment, while any scope is open: of all drivers that have their framework loaded, and to threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from amanda import _imports, _outside, _plugins, interceptor
from amanda._interrupts import undo
from amanda._threads import Threads
from amanda.errors import DriverError

if TYPE_CHECKING:
    from amanda._scope import Scope
    from amanda.backend import Driver


class Attachment:
    """Attaches drivers when the first scope of the process opens, detaches them after the last closes.

    guests: driver classes that are used though no distribution registers them.
    """

    def __init__(self) -> None:
        self.guests: list[type[Driver]] = []
        self._lock = threading.RLock()
        self._scopes: list[Scope] = []
        self._drivers: dict[type[Driver], Driver] = {}
        self._attached: list[Driver] = []
        self._broken: dict[str, str] = {}  # what of, and why
        self._awaited: list[Callable[[], object]] = []
        self._threads = Threads()

    def open(self, scope: Scope) -> None:
        """Count a scope in."""
        with self._lock:
            self._scopes.append(scope)
            if len(self._scopes) == 1:
                self._threads.attach()
                self._attach_loaded()
                self._await_others()
            _outside.watch(self._scopes)
            for what, reason in self._broken.items():
                scope.report.add(what, reason)

    def close(self, scope: Scope) -> None:
        """Count a scope out."""
        with self._lock:
            if scope in self._scopes:
                self._scopes.remove(scope)
            if not self._scopes:
                try:
                    for driver in self._attached:
                        driver.closing(scope.report)
                finally:
                    self._detach_all()

    def abandon(self) -> list[Scope]:
        """Let go of everything in a forked child; the scopes that were open."""
        self._lock = threading.RLock()
        scopes, self._scopes = self._scopes, []
        self._detach_all()
        return scopes

    def driver(self, kind: type[Driver]) -> Driver:
        """The process's one instance of a driver class."""
        if kind not in self._drivers:
            self._drivers[kind] = kind()
        return self._drivers[kind]

    def attach(self, kind: type[Driver]) -> None:
        """Attach a driver now; one that fails is told of in the scopes' reports."""
        with self._lock:
            driver = self.driver(kind)
            if driver in self._attached or not self._scopes:
                return
            self._attached.append(driver)
            try:
                driver.attach()
            except BaseException as error:
                driver.detach()
                self._attached.remove(driver)
                if not isinstance(error, Exception):
                    raise
                reason = str(error) if isinstance(error, DriverError) else f"attaching failed: {error!r}"
                self._broken[kind.__name__] = reason
                for scope in self._scopes:
                    scope.report.add(kind.__name__, reason)
                return
            _plugins.plugin_manager().hook.amanda_driver_attached(driver=driver)

    def _attach_loaded(self) -> None:
        self._broken = {plugin.name: plugin.message for plugin in _plugins.faulty_drivers()}
        for kind in dict.fromkeys([*_plugins.loaded_drivers(), *self.guests]):
            self.attach(kind)

    def _await_others(self) -> None:
        for framework in _plugins.absent_frameworks():
            self._awaited.append(_imports.when_imported(framework, self._attach_loaded))

    def _detach_all(self) -> None:
        interceptor.watch_outside(None)
        undo(self._awaited)
        while self._attached:
            driver = self._attached[-1]
            driver.detach()
            self._attached.pop()
            _plugins.plugin_manager().hook.amanda_driver_detached(driver=driver)
        self._threads.detach()


attachment = Attachment()
