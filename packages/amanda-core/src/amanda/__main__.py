"""The `amanda` command, which is `python -m amanda`: subcommands of the core and of other distributions."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from inspect import getdoc
from pathlib import Path

from amanda.errors import AmandaError, PluginError, UnknownToolError, did_you_mean, printable
from amanda.plugins.commands import (
    OWN,
    TAKEN,
    Command,
    UsageError,
    names_of_commands,
    say,
    table,
    version_of_core,
)
from amanda.plugins.entries import COMMANDS, registry, rivalry
from amanda.plugins.offered import installation

HELP = frozenset({"-h", "--help"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, `info` by default; the exit status, 2 where it is used wrongly."""
    name, *command_arguments = (sys.argv[1:] if arguments is None else arguments) or ["info"]
    if name in HELP:
        return _help()
    if name == "--version":
        say(f"Amanda {version_of_core()}")
        return 0
    if name in OWN and not HELP.isdisjoint(command_arguments):
        say(f"Usage: {_program()} {name} {TAKEN.get(name, '')}".rstrip(), "", getdoc(OWN[name]) or "")
        return 0
    if name not in names_of_commands():
        command = installation(name, "commands")
        hint = f"it is not installed: {command}" if command else did_you_mean(name, names_of_commands())
        return _fail("", f"no command {name!r}; {hint}", 2)
    try:
        return _command(name)(command_arguments) or 0
    except AmandaError as error:
        return _fail(f" {name}", str(error), 2 if isinstance(error, (UsageError, UnknownToolError)) else 1)


def console() -> None:
    """The `amanda` script: run a subcommand and exit."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def _command(name: str) -> Command:
    if name in OWN:
        return OWN[name]
    entries = [entry for entry in registry.entries(COMMANDS, fresh=False) if entry.name == name]
    if len(entries) > 1:
        raise PluginError(rivalry(entries))
    command: Command = entries[0].load()
    return command


def _help() -> int:
    say(f"Usage: {_program()} COMMAND ...", "")
    say(*table([(name, _summary(name)) for name in sorted(names_of_commands())]))
    say("", "`COMMAND --help` tells more, `--version` the version.")
    return 0


def _summary(name: str) -> str:
    """The first line of what a command says of itself."""
    try:
        return next(iter((getdoc(_command(name)) or "").splitlines()), "")
    except PluginError as error:
        return str(error)


def _program() -> str:
    return "python -m amanda" if Path(sys.argv[0]).name == "__main__.py" else "amanda"


def _fail(command: str, message: str, status: int) -> int:
    sys.stderr.write(f"{_program()}{command}: {printable(message)}\n")
    return status


if __name__ == "__main__":
    console()
