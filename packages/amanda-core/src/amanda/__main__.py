"""The `amanda` command, which is `python -m amanda`: `info`, `tools`, `doctor`, and those of others."""

from __future__ import annotations

import inspect
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from amanda.errors import AmandaError, PluginError, UnknownToolError, did_you_mean, printable
from amanda.options import options_of
from amanda.plugins.doctor import diagnoses
from amanda.plugins.drivers import how_to_install
from amanda.plugins.entries import (
    COMMANDS,
    OFFERS,
    TOOLS,
    Plugin,
    extra_command,
    install_command,
    install_hint,
    registry,
    rivalry_message,
)
from amanda.plugins.manager import list_drivers, list_tools, tool_class

Command = Callable[[Sequence[str]], "int | None"]
HELP = frozenset({"-h", "--help"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit status: 1 for an error, 2 for a wrong usage.

    `--help` and `--version` print, with status 0; of errors only the message is printed.
    arguments: the subcommand and its arguments; None for those of the process.  Without a subcommand the
    usage precedes what `info` prints.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        say(*_usage_in_short(), "")
    name, *command_arguments = arguments or ["info"]
    if name in HELP:
        return _help()
    if name == "--version":
        say(f"Amanda {version_of_core()}")
        return 0
    if name in CORE_COMMANDS and not HELP.isdisjoint(command_arguments):
        say(
            f"Usage: {_program()} {name} {ARGUMENTS.get(name, '')}".rstrip(),
            "",
            inspect.getdoc(CORE_COMMANDS[name]) or "",
        )
        return 0
    if name not in names_of_commands():
        # A command of ours that is absent needs its distribution, not a name that looks like it.
        hint = install_hint(name, "commands") or _meant_command(name)
        return _print_error(_program(), f"no command {name!r}; {hint}", status=2)
    try:
        return _load_command(name)(command_arguments) or 0
    except AmandaError as error:
        is_wrong_usage = isinstance(error, (UsageError, UnknownToolError))
        return _print_error(f"{_program()} {name}", str(error), status=2 if is_wrong_usage else 1)


def console() -> None:
    """Run a subcommand as the `amanda` script, and exit; with status 1 if the reader of a pipe has gone."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        # Python flushes standard output once more at its end, which would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def _load_command(name: str) -> Command:
    """Return a command of the core or of another distribution; raise PluginError where two have its name."""
    if name in CORE_COMMANDS:
        return CORE_COMMANDS[name]
    entries = [entry for entry in registry.entries(COMMANDS, fresh=False) if entry.name == name]
    if len(entries) > 1:
        raise PluginError(rivalry_message(entries))
    command: Command = entries[0].load()
    return command


def _meant_command(name: str) -> str:
    """Return the end of an error about an unknown command, which may be the name of a tool."""
    is_tool = any(entry.name == name for entry in registry.entries(TOOLS, fresh=False))
    if is_tool and "run" in names_of_commands():
        return f"did you mean `{_program()} run {name}`?"
    return did_you_mean(name, names_of_commands())


def _usage_in_short() -> list[str]:
    """Return lines on how a program runs under a tool, if that command is installed, and on `--help`."""
    usage = "run TOOL PROGRAM" if "run" in names_of_commands() else "COMMAND"
    return _wrapped(f"Usage: {_program()} {usage}; `{_program()} --help` lists the commands.", " " * 4, "")


def _help() -> int:
    """Print all commands, each with the first line of its docstring."""
    say(f"Usage: {_program()} COMMAND ...", "")
    say(*_aligned([(name, _command_summary(name)) for name in sorted(names_of_commands())]))
    say("", "`COMMAND --help` explains a command, `--version` prints the version.")
    return 0


def _command_summary(name: str) -> str:
    """Return the first line of a command's docstring, or the error of a command that cannot be loaded."""
    try:
        return next(iter((inspect.getdoc(_load_command(name)) or "").splitlines()), "")
    except PluginError as error:
        return str(error)


def _program() -> str:
    return "python -m amanda" if Path(sys.argv[0]).name == "__main__.py" else "amanda"


def _print_error(command: str, message: str, status: int) -> int:
    sys.stderr.write(f"{command}: {printable(message)}\n")
    return status


class UsageError(AmandaError):
    """A command was given what it does not take."""


def info(arguments: Sequence[str] = ()) -> int:
    """Print what is installed, or the options of a tool: `info`, `info --load`, `info TOOL`.

    `--load` imports frameworks, drivers and tools to find out more.
    """
    names = [argument for argument in arguments if not argument.startswith("-")]
    for option in arguments:
        if option.startswith("-") and option != "--load":
            raise UsageError(f"no option {option!r}; {did_you_mean(option, ['--load'])}")
    if len(names) > 1:
        raise UsageError(f"it takes one tool, not {len(names)}: {', '.join(names)}")
    if names:
        return _print_tool(names[0])
    load = "--load" in arguments
    say(f"Amanda {version_of_core()}")
    say(f"Python {platform.python_version()}, {platform.python_implementation()}, {platform.platform()}")
    say(f"Interceptor: {_interceptor_in_words()}")
    say("Drivers:", *_plugin_lines(list_drivers(load), how_to_install()))
    # How a tool is loaded is the same for all.
    tool_plugins = [
        replace(tool, message="") if tool.state == "not loaded" else tool for tool in list_tools(load)
    ]
    say("Tools:", *_plugin_lines(tool_plugins, extra_command("tools")))
    say(*_wrapped(", ".join(sorted(names_of_commands())), " " * 2, "Commands: "))
    return 0


def tools(arguments: Sequence[str] = ()) -> int:
    """List the tools, with a one-line description of each."""
    _require_no_arguments(arguments)
    # Loaded, since the first line of a tool's docstring is in its code.
    tool_plugins = list_tools(load=True)
    say(*(_tools_by_purpose(tool_plugins) if tool_plugins else _install_hint(extra_command("tools"))))
    if tool_plugins:
        say("", "Run `amanda info TOOL` to see a tool's options.")
    installed = {tool.name for tool in tool_plugins}
    # One tool of a distribution is enough to show that it is installed.
    absent_groups = [offer.tools for offer in OFFERS.values() if not installed.intersection(offer.tools)]
    if absent_groups:
        say("", "Not installed:")
        for names in absent_groups:
            say(f"  {install_command(names[0], 'tools')}", *_wrapped(", ".join(names), " " * 6))
    return 0


_PURPOSES = {
    "look": "Look into a model",
    "debug": "Find what is wrong",
    "change": "Change what a model computes, or how",
    "compress": "Make a model smaller and faster",
}


def _tools_by_purpose(tool_plugins: Sequence[Plugin]) -> Iterator[str]:
    """Yield lines with the tools under the headings of their purposes, no wider than the terminal.

    A tool whose `purpose` is None is left out; one that cannot be loaded is among the others, with its error.
    """
    tools_by_heading: dict[str, list[Plugin]] = {heading: [] for heading in (*_PURPOSES.values(), "Others")}
    for tool in tool_plugins:
        has_failed_to_load = bool(tool.message)
        purpose = "" if has_failed_to_load else getattr(tool_class(tool.name), "purpose", "")
        if purpose is not None:
            tools_by_heading[_PURPOSES.get(purpose, "Others")].append(tool)
    name_width = max((len(tool.name) for tool in tool_plugins), default=0)
    for heading, tools in tools_by_heading.items():
        if tools:
            yield f"{heading}:"
        for tool in tools:
            text = printable(tool.message or _tool_summary(tool.name), line=True)
            yield from _wrapped(text, " " * (name_width + 4), f"  {tool.name:<{name_width}}  ")


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines with aligned columns, escaped, and folded into the width of the terminal.

    The last column is folded in its place, or below the others where they leave it less than half a line.
    """
    rows = [[printable(cell, line=True) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    terminal_width = shutil.get_terminal_size().columns
    for *first_cells, last_cell in rows:
        start = "".join(f"  {cell:<{width}}" for cell, width in zip(first_cells, widths, strict=True))
        indent = len(start) + 2
        if indent + len(last_cell) <= terminal_width:
            yield f"{start}  {last_cell}".rstrip()
        elif 2 * indent <= terminal_width:
            yield from _wrapped(last_cell, " " * indent, f"{start}  ")
        else:
            yield start.rstrip()
            yield from _wrapped(last_cell, " " * 6)


def _wrapped(text: str, indent: str, first_indent: str | None = None) -> list[str]:
    """Return a text as lines that fit the terminal.  first_indent: start of the first line, if another."""
    # Names such as amanda-core[tools] are left whole.
    return textwrap.wrap(
        text, shutil.get_terminal_size().columns, subsequent_indent=indent,
        initial_indent=indent if first_indent is None else first_indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


_ENTRY = re.compile(r"\s*[\w*, ]+: ")
"""The beginning of a line that describes an option, or several."""


def _refilled_docstring(docstring: str, indent: str) -> Iterator[str]:
    """Yield the lines of a docstring, indented; paragraphs too wide for the terminal are refilled."""
    columns = shutil.get_terminal_size().columns
    for number, paragraph in enumerate(docstring.split("\n\n")):
        lines = [f"{indent}{line}".rstrip() for line in paragraph.splitlines()]
        if number:
            yield ""
        if max(map(len, lines), default=0) <= columns:
            yield from lines
            continue
        entries: list[list[str]] = []  # lines that are folded together
        for line in lines:
            # A heading, such as "Args:", is a line of its own, and so is the beginning of a description; in
            # the midst of a sentence a word with a colon is none.
            is_first_or_after_heading = not entries or entries[-1][-1].endswith(":")
            is_after_sentence = bool(entries) and entries[-1][-1].endswith(".")
            if is_first_or_after_heading or (is_after_sentence and _ENTRY.match(line)):
                entries.append([])
            entries[-1].append(line)
        for entry in entries:
            first_indent, further_indent = _indent_of(entry[0]), _indent_of(entry[-1])
            # An indented line describes an option; its further lines are indented once more.
            if len(entry) == 1 and first_indent != indent:
                further_indent += " " * 4
            yield from _wrapped(" ".join(map(str.strip, entry)), further_indent, first_indent)


def _indent_of(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def doctor(arguments: Sequence[str] = ()) -> int:
    """Check the installation and suggest fixes; the exit status is 1 if a check fails.

    It imports frameworks, drivers and tools.
    """
    _require_no_arguments(arguments)
    results = list(diagnoses())
    say(*_aligned(results))
    problem_count = sum(diagnosis.verdict == "wrong" for diagnosis in results)
    problems = f"{problem_count} problem{'s' * (problem_count > 1)}" if problem_count else "No problem"
    say("", f"{problems} found ({len(results)} checks).")
    return int(problem_count > 0)


CORE_COMMANDS: dict[str, Command] = {"doctor": doctor, "info": info, "tools": tools}
ARGUMENTS = {"info": "[--load] [TOOL]"}
"""Arguments of commands, for their help."""


def names_of_commands() -> set[str]:
    """Return the names of the core's commands and of those of other distributions."""
    return {*CORE_COMMANDS, *(entry.name for entry in registry.entries(COMMANDS, fresh=False))}


def version_of_core() -> str:
    """Return the version of the core that is installed, or say that the core runs from a source tree."""
    try:
        return f"{version('amanda-core')} (amanda-core)"
    except PackageNotFoundError:
        return "from a source tree that is not installed"


def say(*lines: str) -> None:
    """Write lines to standard output, with escapes for characters that would steer a terminal."""
    # Escaped: a name or a version of a stranger's distribution must not steer the terminal.
    sys.stdout.write("".join(f"{printable(line)}\n" for line in lines))


def _require_no_arguments(arguments: Sequence[str]) -> None:
    if arguments:
        raise UsageError(f"it takes no argument, and was given {arguments[0]!r}")


def _print_tool(name: str) -> int:
    """Print where a tool comes from, its docstring and options, and those of every tool in `amanda run`.

    Returns the exit status, 0; raises UnknownToolError for a name that no tool has.
    """
    working_directory = str(Path.cwd())
    # `amanda` as a script has only its own folder on the path.
    if "." in name and working_directory not in sys.path:
        sys.path.append(working_directory)
    kind = tool_class(name)
    say(*_wrapped(f"{name}: {_public_path(kind)}", " " * 4, ""), "")
    # Options of `select`, which some tools take in Python as well, are among those of every tool.
    parameters = inspect.signature(kind).parameters
    say(*_refilled_docstring(inspect.getdoc(kind) or "", "  "))
    options = [option for option in options_of(kind).values() if option.name in parameters]
    if options:
        # Some defaults differ where no program calls the tool's methods.
        defaults_in_command: dict[str, object] = getattr(kind, "command_options", dict)({})
        notes = {name: f" ({value} in `amanda run`)" for name, value in defaults_in_command.items()}
        say("", "Options, their defaults and values:")
        say(*_aligned([(option.name, option.default_as_text, option.kind.text + notes.get(option.name, ""))
                       for option in options]))  # fmt: skip
    if "run" in names_of_commands():
        say("", "Options of every tool on the command line:")
        say(*_aligned([(name, text) for name, text in COMMON_OPTIONS.items() if name not in parameters]))
    return 0


def _public_path(kind: type) -> str:
    """Return the import path of a class in the shortest package that has it."""
    names = kind.__module__.split(".")
    packages = [".".join(names[:length]) for length in range(1, len(names))]
    holders = [package for package in packages if vars(sys.modules[package]).get(kind.__name__) is kind]
    return f"{holders[0]}.{kind.__name__}" if holders else f"{kind.__module__}.{kind.__qualname__}"


COMMON_OPTIONS = {
    "type": "types of ops: conv2d, conv*, conv2d+linear",
    "module": "modules, with all that lies in them: layer4, *.attention",
    "exclude": "modules to leave out",
    "phase": "forward, backward, optimizer or construction",
    "start": "the first step, from 0",
    "end": "the step before which the tool stops",
    "frequency": "a number of steps, of which the first counts",
    "out": "a file for the result, in the format of its suffix",
    "log": "tensorboard, mlflow, wandb, opentelemetry or jsonl, with a place: jsonl:stats.jsonl",
    "every": "a number of steps, of which the last is logged: 50",
}
"""Texts on the options that every tool has on the command line, by name: the values that each takes."""


def _tool_summary(name: str) -> str:
    """Return the first line of a tool's docstring, or the error of a tool that cannot be loaded."""
    try:
        return next(iter((inspect.getdoc(tool_class(name)) or "").splitlines()), "")
    except PluginError as error:
        return str(error)


def _interceptor_in_words() -> str:
    from amanda.interceptor import NATIVE, REASON

    return "native" if NATIVE else f"pure-Python fallback ({REASON})"


def _plugin_lines(plugins: Iterable[Plugin], command: str) -> list[str]:
    """Return a line for each plugin with its state; without any, the command that installs some."""
    rows = [
        (plugin.name, f"{plugin.distribution} {plugin.version}", plugin.state, plugin.message)
        for plugin in plugins
    ]
    return list(_aligned(rows)) or _install_hint(command)


def _install_hint(command: str) -> list[str]:
    return [f"  none is installed: {command}"]


if __name__ == "__main__":
    console()
