"""`amanda doctor`: what is wrong with an installation, and the fix."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from typing import Literal, NamedTuple

from amanda.errors import PluginError
from amanda.plugins import manager
from amanda.plugins.entries import COMMANDS, Entry, Plugin, registry, rivalry, upgrade
from amanda.plugins.requirements import Unfit, unfit_requirements
from amanda.scope.attachment import attachment
from amanda.tool import Tool, apply

Verdict = Literal["ok", "note", "wrong"]


class Finding(NamedTuple):
    """One thing that was looked at; message: what is the matter and what to do about it."""

    verdict: Verdict
    subject: str
    message: str = ""


def findings() -> Iterator[Finding]:
    """Look at everything; frameworks, drivers, tools and commands are imported."""
    yield Finding("ok", f"Python {platform.python_version()}", platform.platform())
    yield from _check_distributions()
    yield _check_interceptor()
    yield from _check_drivers()
    tools = manager.list_tools(load=True)
    yield from map(_plugin_finding, tools)
    if not tools:
        yield Finding("note", "tools", 'none is installed: pip install "amanda-core[tools]"')
    yield from _check_commands()


def _check_distributions() -> Iterator[Finding]:
    ours = {dist.metadata["Name"]: dist for dist in distributions() if _is_ours(dist)}
    for name, dist in sorted(ours.items()):
        unfit = list(unfit_requirements(dist))
        if not unfit:
            yield Finding("ok", f"{name} {dist.version}")
        for requirement in unfit:
            yield Finding("wrong", f"{name} {dist.version}", _unfit_message(name, requirement))
    try:
        stranger = distribution("amanda")
    except PackageNotFoundError:
        return
    fix = "pip uninstall amanda, then pip install --force-reinstall amanda-core"
    yield Finding("wrong", f"amanda {stranger.version}", f"an unrelated package that takes our place: {fix}")


def _unfit_message(name: str, unfit: Unfit) -> str:
    requirement = f"{unfit.name}{unfit.specifier}"
    return (
        f'it asks for {requirement}, and {unfit.installed} is installed: pip install "{requirement}", '
        f"or {upgrade(name)} if that has a version for it"
    )


def _is_ours(dist: Distribution) -> bool:
    groups = ("amanda.drivers", "amanda.tools", COMMANDS, "amanda.plugins")
    return dist.metadata["Name"] == "amanda-core" or any(point.group in groups for point in dist.entry_points)


def _check_interceptor() -> Finding:
    from amanda.interceptor import NATIVE, REASON

    if NATIVE:
        return Finding("ok", "interceptor", "native")
    return Finding("note", "interceptor", f"pure Python, which is slower: {REASON}")


def _check_drivers() -> Iterator[Finding]:
    drivers = manager.list_drivers(load=True)
    for driver in drivers:
        finding = _plugin_finding(driver)
        if driver.state == "absent":
            finding = finding._replace(verdict="note")
        elif driver.state == "ready":
            finding = finding._replace(message=_framework_version(driver.name.partition("/")[0]))
        yield finding
    if not any(driver.state == "ready" for driver in drivers):
        fix = 'pip install "amanda-core[torch]" or "amanda-core[tf]", and the framework'
        yield Finding("wrong", "drivers", f"no framework can be instrumented: {fix}")
    yield from _check_attachment()


def _framework_version(name: str) -> str:
    return f"{name} {getattr(sys.modules[name], '__version__', 'of unknown version')}"


def _check_attachment() -> Iterator[Finding]:
    """Open a scope, to which every driver that can be used attaches."""
    silence = logging.NullHandler()
    logging.getLogger("amanda").addHandler(silence)
    try:
        with apply(Tool()) as scope:
            slow = {driver.framework: driver.slowdown() for driver in attachment.attached}
    finally:
        logging.getLogger("amanda").removeHandler(silence)
    yield from _check_native_code(slow)
    faulty = {plugin.name for plugin in manager.faulty_drivers()}
    for entry in scope.report:
        if entry.what not in faulty:
            yield Finding("wrong", entry.what, entry.reason)


def _check_native_code(slow: dict[str, str]) -> Iterator[Finding]:
    """Say where routines are called, and what native code lacks to call them; slow: by framework."""
    from amanda.interceptor import NATIVE, statistics

    for framework, lacking in slow.items():
        if lacking:
            message = f"Python calls routines, at a multiple of the time, since native code lacks {lacking}"
            yield Finding("note", f"native code for {framework}", message)
    calls = statistics()
    python = ", ".join(f"{number:,} {reason}" for reason, number in calls["python"].items()) or "none"
    if NATIVE:
        counts = (
            f"{calls['native']:,} in native code, {calls['learned']:,} forms learned; in Python: {python}"
        )
        yield Finding("ok", "calls of ops with routines", counts)


def _plugin_finding(plugin: Plugin) -> Finding:
    subject = f"{plugin.name} of {plugin.distribution} {plugin.version}"
    return Finding("ok" if plugin.state == "ready" else "wrong", subject, plugin.message)


def _check_commands() -> Iterator[Finding]:
    named: dict[str, list[Entry]] = {}
    for entry in registry.entries(COMMANDS):
        named.setdefault(entry.name, []).append(entry)
    for entries in named.values():
        subject = f"command {entries[0]}"
        try:
            entries[0].load()
        except PluginError as error:
            yield Finding("wrong", subject, str(error))
        else:
            rivals = len(entries) > 1
            yield Finding("wrong" if rivals else "ok", subject, rivalry(entries) if rivals else "")
