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
    what: str
    message: str = ""


def findings() -> Iterator[Finding]:
    """Look at everything; frameworks, drivers, tools and commands are imported."""
    yield Finding("ok", f"Python {platform.python_version()}", platform.platform())
    yield from _distributions()
    yield _interceptor()
    yield from _drivers()
    tools = manager.list_tools(load=True)
    yield from map(_plugin, tools)
    if not tools:
        yield Finding("note", "tools", 'none is installed: pip install "amanda-core[tools]"')
    yield from _commands()


def _distributions() -> Iterator[Finding]:
    found = {one.metadata["Name"]: one for one in distributions() if _is_ours(one)}
    for name, one in sorted(found.items()):
        unfit = list(unfit_requirements(one))
        if not unfit:
            yield Finding("ok", f"{name} {one.version}")
        for asked in unfit:
            yield Finding("wrong", f"{name} {one.version}", _unfit(name, asked))
    try:
        stranger = distribution("amanda")
    except PackageNotFoundError:
        return
    fix = "pip uninstall amanda, then pip install --force-reinstall amanda-core"
    yield Finding("wrong", f"amanda {stranger.version}", f"an unrelated package that takes our place: {fix}")


def _unfit(name: str, unfit: Unfit) -> str:
    wanted = f"{unfit.name}{unfit.asked}"
    return (
        f'it asks for {wanted}, and {unfit.installed} is installed: pip install "{wanted}", '
        f"or {upgrade(name)} if that has a version for it"
    )


def _is_ours(one: Distribution) -> bool:
    own = ("amanda.drivers", "amanda.tools", COMMANDS, "amanda.plugins")
    return one.metadata["Name"] == "amanda-core" or any(point.group in own for point in one.entry_points)


def _interceptor() -> Finding:
    from amanda.interceptor import NATIVE, REASON

    if NATIVE:
        return Finding("ok", "interceptor", "native")
    return Finding("note", "interceptor", f"pure Python, which is slower: {REASON}")


def _drivers() -> Iterator[Finding]:
    drivers = manager.list_drivers(load=True)
    for driver in drivers:
        finding = _plugin(driver)
        if driver.state == "absent":
            finding = finding._replace(verdict="note")
        elif driver.state == "ready":
            finding = finding._replace(message=_framework(driver.name.partition("/")[0]))
        yield finding
    if not any(driver.state == "ready" for driver in drivers):
        fix = 'pip install "amanda-core[torch]" or "amanda-core[tf]", and the framework'
        yield Finding("wrong", "drivers", f"no framework can be instrumented: {fix}")
    yield from _attached()


def _framework(name: str) -> str:
    return f"{name} {getattr(sys.modules[name], '__version__', 'of unknown version')}"


def _attached() -> Iterator[Finding]:
    """Open a scope, to which every driver that can be used attaches."""
    silence = logging.NullHandler()
    logging.getLogger("amanda").addHandler(silence)
    try:
        with apply(Tool()) as scope:
            slow = {driver.framework: driver.slowdown() for driver in attachment.attached}
    finally:
        logging.getLogger("amanda").removeHandler(silence)
    yield from _speed(slow)
    faulty = {plugin.name for plugin in manager.faulty_drivers()}
    for entry in scope.report:
        if entry.what not in faulty:
            yield Finding("wrong", entry.what, entry.reason)


def _speed(slow: dict[str, str]) -> Iterator[Finding]:
    """Say where routines are called, and what native code lacks to call them; slow: by framework."""
    from amanda.interceptor import NATIVE, statistics

    for framework, lacking in slow.items():
        if lacking:
            message = f"Python calls routines, at a multiple of the time, since native code lacks {lacking}"
            yield Finding("note", f"native code for {framework}", message)
    calls = statistics()
    python = ", ".join(f"{number:,} {reason}" for reason, number in calls["python"].items()) or "none"
    if NATIVE:
        told = f"{calls['native']:,} in native code, {calls['learned']:,} forms learned; in Python: {python}"
        yield Finding("ok", "calls of ops with routines", told)


def _plugin(plugin: Plugin) -> Finding:
    what = f"{plugin.name} of {plugin.distribution} {plugin.version}"
    return Finding("ok" if plugin.state == "ready" else "wrong", what, plugin.message)


def _commands() -> Iterator[Finding]:
    named: dict[str, list[Entry]] = {}
    for entry in registry.entries(COMMANDS):
        named.setdefault(entry.name, []).append(entry)
    for entries in named.values():
        what = f"command {entries[0]}"
        try:
            entries[0].load()
        except PluginError as error:
            yield Finding("wrong", what, str(error))
        else:
            rivals = len(entries) > 1
            yield Finding("wrong" if rivals else "ok", what, rivalry(entries) if rivals else "")
