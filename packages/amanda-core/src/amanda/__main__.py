"""The `amanda` command, which is `python -m amanda`: subcommands of the core and of other distributions."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from inspect import getdoc
from pathlib import Path

from amanda._commands import OWN, Command, UsageError, names_of_commands, say, table
from amanda._entries import COMMANDS, registry, rivalry
from amanda._plugins import did_you_mean
from amanda.errors import AmandaError, PluginError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, `info` by default; the exit status, 2 where it is used wrongly."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["info"]
    if name in ("-h", "--help"):
        return _help()
    if name in OWN and rest in (["-h"], ["--help"]):
        say(f"usage: {_program()} {name} ...", "", getdoc(OWN[name]) or "")
        return 0
    if name not in names_of_commands():
        return _fail(f"no command {name!r}; {did_you_mean(name, names_of_commands())}", 2)
    try:
        return _command(name)(rest) or 0
    except UsageError as error:
        return _fail(str(error), 2)
    except AmandaError as error:
        return _fail(str(error), 1)


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
    say(f"usage: {_program()} COMMAND ...", "")
    say(*table([(name, _summary(name)) for name in sorted(names_of_commands())]))
    say("", "`COMMAND --help` tells more.")
    return 0


def _summary(name: str) -> str:
    """The first line of what a command says of itself."""
    try:
        return next(iter((getdoc(_command(name)) or "").splitlines()), "")
    except PluginError as error:
        return str(error)


def _program() -> str:
    return "python -m amanda" if Path(sys.argv[0]).name == "__main__.py" else "amanda"


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"{_program()}: {message}\n")
    return status


if __name__ == "__main__":
    console()
