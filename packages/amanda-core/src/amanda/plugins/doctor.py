"""`amanda doctor`: what is wrong with an installation, and the fix."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from typing import Literal, NamedTuple

from amanda.errors import PluginError
from amanda.plugins import manager
from amanda.plugins.entries import (
    COMMANDS,
    Plugin,
    PluginEntry,
    extra_command,
    registry,
    rivalry_message,
    upgrade_command,
)
from amanda.plugins.requirements import Unfit, unfit_requirements
from amanda.plugins.self_test import self_test
from amanda.scope.attachment import attachment
from amanda.scope.driver import framework_version
from amanda.tool import Tool, apply

Verdict = Literal["ok", "note", "wrong"]


class Diagnosis(NamedTuple):
    """One thing that was looked at; message: what is the matter and what to do about it."""

    verdict: Verdict
    subject: str
    message: str = ""


def diagnoses() -> Iterator[Diagnosis]:
    """Check the interpreter, distributions, interceptor, drivers, tools and commands; yield what each is.

    Imports frameworks, drivers, tools and commands.
    """
    yield Diagnosis("ok", f"Python {platform.python_version()}", platform.platform())
    yield from _check_distributions()
    yield _check_interceptor()
    yield from _check_drivers()
    tools = manager.list_tools(load=True)
    yield from map(_plugin_diagnosis, tools)
    if not tools:
        yield Diagnosis("note", "tools", f"none is installed: {extra_command('tools')}")
    yield from _check_commands()


def _check_distributions() -> Iterator[Diagnosis]:
    """Compare what Amanda's distributions require with what is installed, and find a stranger's `amanda`."""
    our_distributions = {dist.metadata["Name"]: dist for dist in distributions() if _is_ours(dist)}
    for name, dist in sorted(our_distributions.items()):
        unmet_requirements = list(unfit_requirements(dist))
        if not unmet_requirements:
            yield Diagnosis("ok", f"{name} {dist.version}")
        for requirement in unmet_requirements:
            yield Diagnosis("wrong", f"{name} {dist.version}", _unfit_message(name, requirement))
    try:
        stranger = distribution("amanda")
    except PackageNotFoundError:
        return
    # Both lie in the folder `amanda`, so ours may have lost files to it.
    fix = "pip uninstall amanda, then pip install --force-reinstall amanda-core"
    yield Diagnosis(
        "wrong", f"amanda {stranger.version}", f"an unrelated package that takes our place: {fix}"
    )


def _unfit_message(name: str, unfit: Unfit) -> str:
    """Say which requirement is not met, and what to install."""
    requirement = f"{unfit.name}{unfit.specifier}"
    return (
        f'it asks for {requirement}, and {unfit.installed} is installed: pip install "{requirement}", '
        f"or {upgrade_command(name)} if that has a version for it"
    )


def _is_ours(dist: Distribution) -> bool:
    groups = ("amanda.drivers", "amanda.tools", COMMANDS, "amanda.plugins")
    return dist.metadata["Name"] == "amanda-core" or any(point.group in groups for point in dist.entry_points)


def _check_interceptor() -> Diagnosis:
    """Say whether the interceptor is native, and why not."""
    from amanda.interceptor import CHECKS, NATIVE, REASON

    if NATIVE:
        python = platform.python_version()
        return Diagnosis("ok", "interceptor", f"native; {CHECKS} checks passed on Python {python}")
    return Diagnosis("note", "interceptor", f"pure Python, which is slower: {REASON}")


def _check_drivers() -> Iterator[Diagnosis]:
    """Import every framework and driver, and say what keeps any from use; then check those that attach."""
    drivers = manager.list_drivers(load=True)
    for driver in drivers:
        diagnosis = _plugin_diagnosis(driver)
        if driver.state == "absent":
            diagnosis = diagnosis._replace(verdict="note")
        elif driver.state == "ready":
            diagnosis = diagnosis._replace(message=_framework_version(driver.name.partition("/")[0]))
        yield diagnosis
    # Without a framework no op is seen: that is wrong, however well all else is.  The scope that is opened
    # below reports that there is no driver.
    if drivers and all(driver.state == "absent" for driver in drivers):
        frameworks = sorted({driver.name.partition("/")[0] for driver in drivers})
        fix = f"pip install {' or '.join(frameworks)}"
        yield Diagnosis("wrong", "drivers", f"no framework can be instrumented: {fix}")
    yield from _check_attachment()


def _framework_version(name: str) -> str:
    return f"{name} {framework_version(name) or 'of unknown version'}"


def _check_attachment() -> Iterator[Diagnosis]:
    """Open a scope, to which every driver that can be used attaches; run the drivers' self-tests in it.

    Yields their results, what native code lacks, and what the report of the scope says.
    """
    # What a driver logs is in the report, which becomes lines of the table below.
    null_handler = logging.NullHandler()
    logging.getLogger("amanda").addHandler(null_handler)
    try:
        # The surest test: what a user's first scope would do.
        with apply(Tool()) as scope:
            missing_by_framework = {
                driver.framework: driver.missing_native_support() for driver in attachment.attached
            }
            verdict_by_driver = {driver: self_test(driver) for driver in attachment.attached}
    finally:
        logging.getLogger("amanda").removeHandler(null_handler)
    for driver, verdict in verdict_by_driver.items():
        subject = f"self-test of {driver.framework}, {driver.modes[0]} mode"
        if verdict.failure:
            yield Diagnosis("wrong", subject, verdict.failure)
        elif verdict.passed:
            yield Diagnosis("ok", subject, f"{verdict.passed} checks passed")
    yield from _check_native_code(missing_by_framework)
    # These have a line already, from the list of drivers.
    names_of_faulty_drivers = {plugin.name for plugin in manager.faulty_drivers()}
    for entry in scope.report:
        if entry.what not in names_of_faulty_drivers:
            yield Diagnosis("wrong", entry.what, entry.reason)


def _check_native_code(missing_by_framework: dict[str, str]) -> Iterator[Diagnosis]:
    """Say what native code lacks to call routines, and, if there is any, how many calls it has run so far.

    missing_by_framework: names that a driver did not find; "" for none.
    """
    from amanda.interceptor import NATIVE, statistics

    # A missing symbol costs time and nothing else, so it is a note.
    for framework, missing_support in missing_by_framework.items():
        if missing_support:
            message = "Python calls routines, which is several times slower: native code lacks "
            yield Diagnosis("note", f"native code for {framework}", message + missing_support)
    counts = statistics()
    python_counts = ", ".join(f"{number:,} {reason}" for reason, number in counts["python"].items()) or "none"
    if NATIVE:
        message = (
            f"{counts['native']:,} in native code, {counts['learned']:,} forms learned; "
            f"in Python: {python_counts}"
        )
        yield Diagnosis("ok", "calls of ops with routines", message)


def _plugin_diagnosis(plugin: Plugin) -> Diagnosis:
    subject = f"{plugin.name} of {plugin.distribution} {plugin.version}"
    return Diagnosis("ok" if plugin.state == "ready" else "wrong", subject, plugin.message)


def _check_commands() -> Iterator[Diagnosis]:
    """Load every command; say which fail, and which have one name."""
    entries_by_name: dict[str, list[PluginEntry]] = {}
    for entry in registry.entries(COMMANDS):
        entries_by_name.setdefault(entry.name, []).append(entry)
    for entries in entries_by_name.values():
        subject = f"command {entries[0]}"
        try:
            entries[0].load()
        except PluginError as error:
            yield Diagnosis("wrong", subject, str(error))
        else:
            if len(entries) > 1:
                yield Diagnosis("wrong", subject, rivalry_message(entries))
            else:
                yield Diagnosis("ok", subject)
