"""Tools and hooks of installed distributions, and the names that the rest of the core asks for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any

import pluggy

from amanda.errors import OptionError, PluginError, UnknownToolError, did_you_mean
from amanda.options import Name, checked, options_of
from amanda.plan.tools import hooks
from amanda.plugins import drivers, hookspecs
from amanda.plugins.drivers import (
    absent_frameworks,
    driven_frameworks,
    faulty_drivers,
    list_drivers,
    loaded_drivers,
)
from amanda.plugins.entries import (
    COMMANDS,
    HOOKS,
    TOOLS,
    Plugin,
    PluginEntry,
    extra_command,
    install_hint,
    registry,
    rivalry_message,
    upgrade_command,
)
from amanda.scope.attachment import attachment
from amanda.tool import Tool

__all__ = [
    "Plugin",
    "absent_frameworks",
    "driven_frameworks",
    "faulty_drivers",
    "list_drivers",
    "list_tools",
    "load_tool",
    "loaded_drivers",
    "plugin_manager",
    "tool_class",
]


@checked
def list_tools(load: bool = False) -> list[Plugin]:
    """Return the tools that are installed, with their state.

    Args:
        load: Import the tools to find out; otherwise nothing is imported.
    """
    entries_by_name = _tool_entries()
    return [_plugin_state(entry, entries, load) for entries in entries_by_name.values() for entry in entries]


def tool_class(name: str) -> type[Tool]:
    """Return the class, or function, that a distribution registers as a tool, for commands.

    A tool that is installed while the process runs is found if no other has the name.

    Args:
        name: As `amanda tools` lists it, such as "flops"; or an import path, MODULE.CLASS.

    Raises:
        UnknownToolError: If no distribution registers the name, or nothing is at the import path.
        PluginError: If the tool cannot be used.
    """
    kind: type[Tool]
    entries_by_name = _tool_entries(fresh=False)
    if name not in entries_by_name:
        module_name, _, class_name = name.rpartition(".")
        if module_name:
            try:
                kind = getattr(import_module(module_name), class_name)
            except (ImportError, AttributeError) as error:
                raise UnknownToolError(f"tool {name} cannot be imported: {error}") from error
            if not callable(kind):
                raise UnknownToolError(f"{name} is a {type(kind).__name__}, not the class of a tool")
            return kind
        entries_by_name = _tool_entries()
    kind = _only_entry(
        name, entries_by_name, "; a tool of your own is MODULE.CLASS, as mytools.ZeroSmall"
    ).load()
    return kind


@checked
def load_tool(name: Name, /, **options: Any) -> Tool:
    """Make the tool that a distribution registers under a name, with these options.

    Args:
        name: As `amanda tools` lists it, such as "flops".
        **options: Of the tool, as `amanda info NAME` lists them.

    Returns:
        The tool, which is not applied yet.

    Raises:
        UnknownToolError: If no distribution registers the name.
        OptionError: For an option that the tool does not take or lacks.
        PluginError: If the tool cannot be used.
    """
    entry = _only_entry(name, _tool_entries())
    tool_type = entry.load()
    signature, option_by_name = inspect.signature(tool_type), options_of(tool_type)
    unknown_names = sorted(options.keys() - option_by_name)
    try:
        # Bound before the call, so that a TypeError from within the tool's own code is not taken for a wrong
        # option.
        signature.bind(**options)
        # `**options: Unpack[Options]` would let any name through.
        has_unpacked_options = option_by_name.keys() - signature.parameters
        if unknown_names and has_unpacked_options:
            raise TypeError(f"got an unexpected keyword argument {unknown_names[0]!r}")
    except TypeError as error:
        similar_names = get_close_matches(unknown_names[0], option_by_name, n=1) if unknown_names else []
        hint = f"did you mean {similar_names[0]}? " if similar_names else ""
        raise OptionError(f"tool {name}: {error}; {hint}{_options_in_words(tool_type)}") from None
    tool = tool_type(**options)
    if not isinstance(tool, Tool):
        raise PluginError(
            f"{entry} makes a {type(tool).__name__}, not a tool; {upgrade_command(entry.distribution)}"
        )
    return tool


# The plugins of a process are loaded once; those that it makes itself register with the result.
@cache
def plugin_manager() -> pluggy.PluginManager:
    """Return the hooks of `amanda.plugins.hookspecs`, with every hook plugin that can be used; log others."""
    manager = pluggy.PluginManager("amanda")
    manager.add_hookspecs(hookspecs)
    for entry in registry.entries(HOOKS, fresh=False):
        _register_hooks(manager, entry)
    return manager


def _tool_entries(fresh: bool = True) -> dict[str, list[PluginEntry]]:
    """Return the entries of tools by name."""
    entries_by_name: dict[str, list[PluginEntry]] = {}
    for entry in registry.entries(TOOLS, fresh):
        entries_by_name.setdefault(entry.name, []).append(entry)
    return entries_by_name


def _only_entry(name: str, entries_by_name: Mapping[str, list[PluginEntry]], remark: str = "") -> PluginEntry:
    """Return the only entry of a tool's name; raise UnknownToolError or PluginError otherwise.

    remark: follows the names of all tools, where the error has these.
    """
    if name not in entries_by_name:
        hint = install_hint(name, "tools") or _meant_feature(name)
        if not hint and entries_by_name:
            hint = did_you_mean(name, entries_by_name)
            hint += "" if hint.endswith("?") else remark
        hint = hint or f"none is installed: {extra_command('tools')}"
        raise UnknownToolError(f"no tool {name!r}; {hint}")
    entries = entries_by_name[name]
    if len(entries) > 1:
        raise PluginError(rivalry_message(entries))
    return entries[0]


def _meant_feature(name: str) -> str:
    """Say how something is used that is no tool, but has a page among those of tools; "" for other names."""
    if any(entry.name == name for entry in registry.entries(COMMANDS, fresh=False)):
        return f"{name} is a command: amanda {name} --help"
    if name == "live":
        return "live is the option log=: amanda run stats:log=jsonl:stats.jsonl train.py"
    if name == "dynamic_prune":
        return "its tools are activation_prune, attention_prune and dynamic_channel_prune"
    return install_hint(name, "commands") or ""


def _plugin_state(entry: PluginEntry, entries_of_name: list[PluginEntry], load: bool) -> Plugin:
    """Describe a tool for users: its state, and what is the matter; loads the tool to find out if `load`."""
    if len(entries_of_name) > 1:
        return entry.plugin("duplicate", rivalry_message(entries_of_name))
    if not load and not entry.was_loaded:
        return entry.plugin("not loaded", f"loads with amanda.load_tool({entry.name!r})")
    try:
        entry.load()
    except PluginError as error:
        return entry.plugin("broken import", str(error))
    return entry.plugin("ready")


def _options_in_words(kind: type[Tool]) -> str:
    parameters = inspect.signature(kind).parameters  # not the options of `select`, which many tools take
    option_texts = [str(option) for option in options_of(kind).values() if option.name in parameters]
    return f"its options are {', '.join(option_texts)}" if option_texts else "it takes no options"


def _register_hooks(manager: pluggy.PluginManager, entry: PluginEntry) -> None:
    """Register a plugin's hooks; log a plugin that cannot be used."""
    try:
        plugin = entry.load()
        manager.register(plugin, name=str(entry))
    except PluginError as error:
        registry.log_once(str(error))
        return
    except Exception as error:
        registry.log_once(f"{entry} cannot be registered ({error}): {upgrade_command(entry.distribution)}")
        return
    try:
        # At once, so that the plugin whose hook is misspelt can be named.
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        manager.unregister(plugin)
        registry.log_once(
            f"{entry} implements a hook that is none ({error}): {upgrade_command(entry.distribution)}"
        )


def _call_hooks(hook: str, **arguments: Any) -> None:
    call = getattr(plugin_manager().hook, hook)
    if call.get_hookimpls():  # asked at each analysis of an op, where a call takes five times as long
        call(**arguments)


# Rooms below cannot import this one, so it puts its functions there.
hooks.call = _call_hooks
attachment.installed = drivers
