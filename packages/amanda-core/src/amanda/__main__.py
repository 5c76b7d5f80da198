"""`python -m amanda`: what is installed, what can be used, and what to do about the rest."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from amanda._entries import COMMANDS, Plugin, registry, rivalry
from amanda._plugins import did_you_mean, list_drivers, list_tools
from amanda.errors import AmandaError, PluginError

Command = Callable[[Sequence[str]], "int | None"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, `info` by default; the exit status, 2 where it is used wrongly."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["info"]
    if name in ("-h", "--help"):
        _say(f"usage: python -m amanda [{' | '.join(sorted(_names()))}] ...")
        return 0
    if name not in _names():
        return _fail(f"no command {name!r}; {did_you_mean(name, _names())}", 2)
    try:
        return _command(name)(rest) or 0
    except AmandaError as error:
        return _fail(str(error), 1)


def info(arguments: Sequence[str] = ()) -> int:
    """Print versions, the interceptor in use, and the state of drivers and tools.

    `--load` imports frameworks, drivers and tools to find out more.
    """
    unknown = [argument for argument in arguments if argument != "--load"]
    if unknown:
        return _fail(f"info does not take {unknown[0]!r}; {did_you_mean(unknown[0], ['--load'])}", 2)
    load = "--load" in arguments
    _say(f"Amanda {_version()}")
    _say(f"Python {platform.python_version()}, {platform.python_implementation()}, {platform.platform()}")
    _say(f"Interceptor: {_interceptor()}")
    _say("Drivers:", *_table(list_drivers(load), "torch"))
    _say("Tools:", *_table(list_tools(load), "tools"))
    _say(f"Commands: {', '.join(sorted(_names()))}")
    return 0


_OWN: dict[str, Command] = {"info": info}


def _names() -> set[str]:
    return {*_OWN, *(entry.name for entry in registry.entries(COMMANDS, fresh=False))}


def _command(name: str) -> Command:
    if name in _OWN:
        return _OWN[name]
    entries = [entry for entry in registry.entries(COMMANDS, fresh=False) if entry.name == name]
    if len(entries) > 1:
        raise PluginError(rivalry(entries))
    command: Command = entries[0].load()
    return command


def _version() -> str:
    try:
        return f"{version('amanda-core')} (amanda-core)"
    except PackageNotFoundError:
        return "from a source tree that is not installed"


def _interceptor() -> str:
    from amanda.interceptor import NATIVE, REASON

    return "native" if NATIVE else f"pure-Python fallback ({REASON})"


def _table(plugins: Iterable[Plugin], extra: str) -> list[str]:
    rows = [
        (plugin.name, f"{plugin.distribution} {plugin.version}", plugin.state, plugin.message)
        for plugin in plugins
    ]
    if not rows:
        return [f'  none is installed: pip install "amanda-core[{extra}]"']
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:3]]
    return ["  " + "  ".join([*map(str.ljust, row, widths), row[3]]).rstrip() for row in rows]


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"python -m amanda: {message}\n")
    return status


def console() -> None:
    """The `amanda` script: run a subcommand and exit."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    console()
