"""Drivers of installed distributions: which there are, and which can be used.

A driver's entry is named after its framework's import name, or framework/mode, so that nothing is
imported to find it. Two drivers for one framework may stand side by side if no mode is in both.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING

from amanda.errors import PluginError
from amanda.interceptor.imports import is_imported
from amanda.options import checked
from amanda.plugins.entries import (
    DRIVERS,
    ImportFailure,
    Plugin,
    PluginEntry,
    extra_command,
    registry,
    rivalry_message,
    run_import,
    upgrade_command,
)

if TYPE_CHECKING:
    from amanda.scope.driver import Driver

_ANY = "amanda-driver-FRAMEWORK"


@checked
def list_drivers(load: bool = False) -> list[Plugin]:
    """Return the drivers that are installed, with their state.

    Args:
        load: Import the frameworks and their drivers to find out; otherwise nothing is imported.
    """
    return [candidate.plugin for candidate in _candidates(registry.entries(DRIVERS), load)]


def loaded_drivers(may_retry: bool = True) -> list[type[Driver]]:
    """Return the driver classes that can be used now: those whose framework has been imported.

    may_retry: whether a driver whose import failed before is imported once more.
    A faulty driver is logged once and stops no other.
    """
    # A dict as an ordered set: drivers attach in the order of their entries.
    driver_types: dict[type[Driver], None] = {}
    for candidate in _of_imported_frameworks(may_retry):
        if candidate.driver_type is None:
            registry.log_once(candidate.plugin.message)
        else:
            driver_types[candidate.driver_type] = None
    return list(driver_types)


def faulty_drivers() -> list[Plugin]:
    """Return the drivers that `loaded_drivers` could not use though their framework has been imported."""
    candidates = _of_imported_frameworks(may_retry=False)
    return [candidate.plugin for candidate in candidates if candidate.driver_type is None]


def absent_frameworks() -> list[str]:
    """Return the import names of the frameworks that have a driver and have not been imported."""
    return [name for name in driven_frameworks() if not is_imported(name)]


def driven_frameworks() -> list[str]:
    """Return the import names of the frameworks that have a driver."""
    # Not fresh: this is asked as each scope opens, and reading all metadata takes milliseconds.
    return sorted({_framework(entry) for entry in registry.entries(DRIVERS, fresh=False)})


def version_note(driver: Driver) -> str:
    """Return a note where the driver's tests never ran on its framework's version, "" elsewhere.

    Raises DriverError if the driver fails its self-test there.
    """
    from amanda.plugins import self_test  # it makes tools, and their module imports the attachment's users

    return self_test.version_note(driver)


def missing_driver_hint() -> str:
    """Say how to get a driver where none is installed, or none of the imported frameworks; "" otherwise."""
    driven_names = driven_frameworks()
    if not driven_names:
        return f"no driver is installed, so no op is seen: {how_to_install()}"
    for name in _driver_extras():
        if name not in driven_names and is_imported(name):
            return f"no op of {name} is seen, for its driver is missing: {extra_command(name)}"
    return ""


def how_to_install() -> str:
    """Return the command that installs the drivers that frameworks lack here, or any driver if none does."""
    frameworks = [name for name in _driver_extras() if name not in ("all", "tf")]
    driven_names = driven_frameworks()
    if undriven := [name for name in frameworks if name not in driven_names and _is_installed(name)]:
        return extra_command(*undriven)
    if not frameworks:
        return f"pip install {_ANY}"
    *others, example = sorted(frameworks, key="torch".__eq__)
    # The driver's distribution, and so its folder, is named "tf".
    others_text = ", ".join(others).replace("tensorflow", "tf")
    return f"{extra_command(example)}, or {others_text} in place of {example}"


@cache
def _driver_extras() -> Sequence[str]:
    """Return the extras with which the core installs drivers: names of frameworks, and "all".

    Empty where the core is not installed, but runs from its sources.
    """
    try:
        requirements = importlib.metadata.requires("amanda-core") or []
    except importlib.metadata.PackageNotFoundError:  # it runs from its sources
        return []
    return sorted(
        set(re.findall(r"^amanda-driver-.*extra == [\"'](\w+)", "\n".join(requirements), re.MULTILINE))
    )


@dataclass
class _DriverCandidate:
    """A driver's entry, its description for users, and its class; None where that cannot be used (yet)."""

    entry: PluginEntry
    plugin: Plugin
    driver_type: type[Driver] | None = None

    def is_rival_of(self, candidate: _DriverCandidate) -> bool:
        """Return True if both claim a mode of one framework; before they are loaded only their names tell."""
        if _framework(self.entry) != _framework(candidate.entry):
            return False
        first, second = self.driver_type, candidate.driver_type
        if first is not None and second is not None:
            return first is not second and not {*first.modes}.isdisjoint(second.modes)
        are_unloaded = self.plugin.state == candidate.plugin.state == "not loaded"
        return are_unloaded and self.entry.name == candidate.entry.name


def _of_imported_frameworks(may_retry: bool) -> list[_DriverCandidate]:
    entries = registry.entries(DRIVERS, fresh=False)
    return _candidates([entry for entry in entries if is_imported(_framework(entry))], may_retry=may_retry)


def _candidates(
    entries: Sequence[PluginEntry], load: bool = False, may_retry: bool = False
) -> list[_DriverCandidate]:
    """Return a candidate for each entry; those that claim one mode of a framework are marked as duplicates.

    load: import frameworks and drivers to find out.  may_retry: import once more what failed before.
    """
    candidates = [_candidate_of(entry, load, may_retry) for entry in entries]
    rivals_by_framework: dict[str, list[_DriverCandidate]] = {}
    for first, second in combinations(candidates, 2):
        if first.is_rival_of(second):
            rivals = rivals_by_framework.setdefault(_framework(first.entry), [])
            rivals += [candidate for candidate in (first, second) if candidate not in rivals]
    for rivals in rivals_by_framework.values():
        message = rivalry_message([candidate.entry for candidate in rivals])
        for candidate in rivals:
            # Neither is used: which of two drivers sees an op must not depend on the order of installation.
            candidate.plugin, candidate.driver_type = candidate.entry.plugin("duplicate", message), None
    return candidates


def _candidate_of(entry: PluginEntry, load: bool, may_retry: bool) -> _DriverCandidate:
    """Return the candidate of an entry, loaded if its framework has been imported, or if `load`.

    A failure is in its description, with the fix.
    """
    framework = _framework(entry)
    try:
        if load and _is_installed(framework):
            run_import(lambda: importlib.import_module(framework))
        if not _is_installed(framework):
            plugin = entry.plugin("absent", f"{framework} is not installed: pip install {framework}")
        elif not is_imported(framework):
            plugin = entry.plugin("not loaded", f"loads once {framework} is imported")
        else:
            return _load_candidate(entry, load or may_retry)
    except PluginError as error:
        plugin = entry.plugin("broken import", str(error))
    except ImportFailure as failure:
        fault = f"{framework} itself fails to import ({failure})"
        fix = failure.fix(f"pip install --force-reinstall {framework}", framework.partition(".")[0])
        plugin = entry.plugin("broken import", f"{fault}: {fix}")
    return _DriverCandidate(entry, plugin)


def _load_candidate(entry: PluginEntry, may_retry: bool) -> _DriverCandidate:
    """Load a driver's class; return its candidate, without the class if it is for another driver API.

    Raises PluginError if its import fails.
    """
    from amanda.scope.driver import DRIVER_API

    driver_type = entry.load(may_retry)
    # An entry may name something that is not a driver at all.
    api = getattr(driver_type, "api", None)
    if api == DRIVER_API:
        return _DriverCandidate(entry, entry.plugin("ready"), driver_type)
    core = f"amanda-core {importlib.metadata.version('amanda-core')}"
    is_newer_than_core = isinstance(api, int) and api > DRIVER_API
    fix = upgrade_command("amanda-core" if is_newer_than_core else entry.distribution)
    message = f"{entry} is written for driver API {api}, {core} speaks {DRIVER_API}: {fix}"
    return _DriverCandidate(entry, entry.plugin("wrong API", message))


def _framework(entry: PluginEntry) -> str:
    return entry.name.partition("/")[0]


def _is_installed(framework: str) -> bool:
    """Return True if a framework could be imported, without an import."""
    if is_imported(framework):
        return True
    try:
        # Looks for files only; an import of the framework would take seconds.
        return importlib.util.find_spec(framework) is not None
    except (ImportError, ValueError):
        return False
