"""Attaching drivers of imported frameworks, and patches of threads, while any scope intercepts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from amanda import interceptor
from amanda.errors import DriverError
from amanda.interceptor.imports import when_imported
from amanda.interceptor.interrupts import undo
from amanda.plan.tools import hooks
from amanda.scope.driver import Driver
from amanda.scope.report import logger
from amanda.scope.state import when_switched
from amanda.scope.threads import Threads

if TYPE_CHECKING:
    from amanda.scope.scope import Scope


class FaultyDriver(Protocol):
    """A driver that cannot be used."""

    @property
    def name(self) -> str:
        """Return the name of the driver's framework."""

    @property
    def message(self) -> str:
        """Say what is the matter, and what to do about it."""


class InstalledDrivers(Protocol):
    """Finds the drivers of installed distributions."""

    def loaded_drivers(self) -> Iterable[type[Driver]]:
        """Return the drivers whose frameworks have been imported."""

    def faulty_drivers(self) -> Iterable[FaultyDriver]:
        """Return the drivers of imported frameworks that cannot be used."""

    def absent_frameworks(self) -> Iterable[str]:
        """Return the names of frameworks that have a driver and have not been imported."""

    def version_note(self, driver: Driver) -> str:
        """Return a note if the driver was never tested on its framework's version, "" otherwise.

        Raises DriverError if the driver cannot serve that version.
        """

    def missing_driver_hint(self) -> str:
        """Say how to get a driver where none can be used; "" where one can."""


class Attachment:
    """Attaches drivers when the first scope that intercepts opens, detaches them after the last.

    installed: finds the drivers of installed distributions; `amanda.plugins` sets it.
    guests: driver classes that are used though no distribution registers them.
    """

    installed: InstalledDrivers

    def __init__(self) -> None:
        self.guests: list[type[Driver]] = []
        # Reentrant: a driver's `attach` imports modules, whose import may attach the driver of another
        # framework.
        self._lock = threading.RLock()
        self._scopes: list[Scope] = []
        self._intercepting: list[Scope] = []
        self._drivers: dict[type[Driver], Driver] = {}
        self._attached: list[Driver] = []
        self._faulty: list[FaultyDriver] = []
        self._failure_reasons: dict[str, str] = {}  # by the subject of the report
        self._tried_drivers: set[type[Driver]] = set()
        self._import_watches: list[Callable[[], object]] = []
        self._threads = Threads()

    def open(self, scope: Scope, intercepts: bool) -> None:
        """Register a scope that opens; attach the drivers if it is the first that intercepts.

        What cannot be attached is reported to the scope, as are threads that run ops outside of scopes.
        intercepts: whether a tool of the scope needs calls to be intercepted.
        """
        with self._lock:
            self._scopes.append(scope)
            if not intercepts:
                return
            self._intercepting.append(scope)
            if len(self._intercepting) == 1:
                self._threads.attach()
                self._attach_loaded()
                self._attach_at_import()
            elif self._faulty:  # what an import lacked may be there by now
                self._attach_loaded()
            if not (self._attached or self.guests) and (reason := self.installed.missing_driver_hint()):
                self._failure_reasons["drivers"] = reason
            report_threads_outside(self._intercepting)
            # Told to every scope: each report stands for itself.
            for subject, reason in self._failure_reasons.items():
                scope.report.add(subject, reason)

    def close(self, scope: Scope) -> None:
        """Unregister a scope; finish and detach the drivers if no scope that intercepts is left."""
        with self._lock:
            for scopes in (self._scopes, self._intercepting):
                if scope in scopes:
                    scopes.remove(scope)
            if not self._intercepting:
                try:
                    for driver in self._attached:
                        # Before anything is detached: to finish may take ops that are seen.
                        driver.before_detach(scope.report)
                finally:
                    self._detach_all()

    def detach_in_child(self) -> list[Scope]:
        """Detach everything in a forked child; return the scopes that were open."""
        # A thread of the parent may hold the lock, and that thread is not in this process.
        self._lock = threading.RLock()
        scopes, self._scopes, self._intercepting = self._scopes, [], []
        self._detach_all()
        return scopes

    @property
    def scopes(self) -> list[Scope]:
        """Return the scopes that are open."""
        with self._lock:
            return list(self._scopes)

    @property
    def attached(self) -> tuple[Driver, ...]:
        """Return the drivers that are attached now."""
        return tuple(self._attached)

    def driver(self, kind: type[Driver]) -> Driver:
        """Return the process's one instance of a driver class; make it, and register its framework, once."""
        if kind not in self._drivers:
            driver = kind()
            driver.register_framework()
            self._drivers[kind] = driver
        return self._drivers[kind]

    def attach(self, kind: type[Driver]) -> None:
        """Attach a driver now, if a scope intercepts; report one that fails to the open scopes.

        Tries the driver if its framework's version is untested, and tells plugins.  An interrupt passes.
        """
        with self._lock:
            if not self._intercepting:
                return
            driver = None
            try:
                driver = self.driver(kind)
                if driver in self._attached:
                    return
                # Before `attach`, so that an exception in the middle of it finds what there is to detach.
                self._attached.append(driver)
                # Before any patch: a driver whose framework lacks a name patches nothing.
                driver.check_private_names()
                driver.attach()
                # Switches of tools are frequent, and most drivers have nothing to follow.
                if kind.on_state_change is not Driver.on_state_change:
                    when_switched.append(driver.on_state_change)
                self._try_on_untested_version(driver)
            except BaseException as error:
                if driver is not None:
                    self._detach(driver)
                # An interrupt is the user's; an error of one driver must not stop the scope, which has
                # others.
                if not isinstance(error, Exception):
                    raise
                reason = str(error) if isinstance(error, DriverError) else f"attaching failed: {error!r}"
                # For the driver's author; the report is for the user.
                logger.debug("%s cannot be attached", kind.__name__, exc_info=error)
                self._failure_reasons[kind.__name__] = reason
                for scope in self._intercepting:
                    scope.report.add(kind.__name__, reason)
                return
            hooks.call("amanda_driver_attached", driver=driver)

    def _try_on_untested_version(self, driver: Driver) -> None:
        """Try a driver, once in a process, on a version of its framework that its tests never ran on.

        Raises DriverError if it cannot serve that version, else reports that it was tried.
        """
        if type(driver) not in self._tried_drivers and (note := self.installed.version_note(driver)):
            # To the first scope alone: nothing is left out, so that later reports need not repeat it.
            for scope in self._intercepting:
                scope.report.add(driver.framework, note)
        self._tried_drivers.add(type(driver))

    def _detach(self, driver: Driver) -> None:
        """Detach a driver, which follows switches of the state no more."""
        if driver.on_state_change in when_switched:
            when_switched.remove(driver.on_state_change)
        driver.detach()
        # Only now: after an interrupt the next closing finds the driver, and detaches it again.
        self._attached.remove(driver)

    def _attach_loaded(self) -> None:
        """Attach all drivers whose framework has been imported; note for reports which cannot be used."""
        driver_types = dict.fromkeys([*self.installed.loaded_drivers(), *self.guests])
        self._faulty = [*self.installed.faulty_drivers()]
        self._failure_reasons = {driver.name: driver.message for driver in self._faulty}
        for driver_type in driver_types:
            self.attach(driver_type)

    def _attach_at_import(self) -> None:
        """Attach the drivers of frameworks that are not imported yet as soon as these are imported."""
        for framework in self.installed.absent_frameworks():
            self._import_watches.append(when_imported(framework, self._attach_loaded))

    def _detach_all(self) -> None:
        """Leave frameworks, threads and the interceptor as they were found; tell plugins of each driver."""
        interceptor.watch_outside(None)
        # A kept exception holds frames, with the tensors in them.
        interceptor.forget_failures()
        undo(self._import_watches)
        while self._attached:
            driver = self._attached[-1]
            self._detach(driver)
            hooks.call("amanda_driver_detached", driver=driver)
        self._threads.detach()


attachment = Attachment()


OUTSIDE = (
    "ran ops outside of the scope: it started before, or in C; scope.bind(function) brings the scope along"
)

_this_thread = threading.local()


def report_threads_outside(scopes: Collection[Scope]) -> None:
    """Name, in the reports of these open scopes, each thread that runs ops where no scope is in force.

    A thread that opens scopes itself, such as this one, knows what runs outside of them, and is not named.
    """
    _this_thread.opens_scopes = True
    interceptor.watch_outside(partial(_report_thread, scopes))


def _report_thread(scopes: Collection[Scope]) -> bool:
    """Report this thread to scopes, unless it opens scopes itself; return True if that is settled.

    Returns False, and reports nothing, where tools are switched off just now, or a routine's thread runs.
    No lock is taken: an import may run ops, and attaching drivers imports.
    """
    if getattr(_this_thread, "opens_scopes", False):
        return True
    activation = interceptor.ACTIVATION.get(None)
    if activation is not None:
        is_switched_off = bool(activation.state.scopes)
        is_of_routine = activation.state.stack is None
        if is_switched_off or is_of_routine:
            return False
    thread_id = threading.get_ident()
    name = next((thread.name for thread in threading.enumerate() if thread.ident == thread_id), thread_id)
    for scope in tuple(scopes):
        scope.report.add(f"thread {name}", OUTSIDE)
    return True
