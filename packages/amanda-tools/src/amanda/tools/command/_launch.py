"""Start of the program under tools, and of programs that replace it by `os.exec*`."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

from amanda.plugins import driven_frameworks
from amanda.tools.command._processes import VARIABLE, Handed, folder_of_ranks, is_in_rank, nothing
from amanda.tools.command._spec import SpecError, ToolSpec
from amanda.tools.models import is_model

_WITH_VALUE = "WXQ"
_GIVE = "give a script, -m module, a command on PATH, or a model such as hf:llama, timm:resnet50 or FILE.onnx"
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def command_of(program: Sequence[str]) -> tuple[list[str], bool]:
    """Return the command line of a program, and True if Python runs it.

    `script.py ...`, `-m module ...`, `-c code ...` and further options are for this Python; another
    executable file, and the name of one on PATH, is run as it is.  A word of `amanda.tools.models`, such as
    `hf:llama`, is a program that runs the model.
    Raises SpecError for a program that does not exist.
    """
    first = program[0]
    if first.startswith("-"):
        _check_flags(program)
        return [sys.executable, *program], True
    if is_model(first):
        return [sys.executable, "-m", "amanda.tools.models", *program], True
    path = Path(first)
    if path.is_dir() or (path.is_file() and _is_script(path)):
        return [sys.executable, *program], True
    executable = first if path.is_file() else shutil.which(first)
    if executable is None:
        scripts = {script.stem: script for script in path.parent.glob("*.py")}
        near = get_close_matches(path.stem, scripts, n=1)
        hint = f"did you mean {scripts[near[0]]}?" if near else ""
        raise SpecError(f"there is no {first!r}; {hint or _GIVE}")
    return [executable, *program[1:]], is_python(Path(executable))


def launch(
    program: Sequence[str],
    tools: Sequence[ToolSpec],
    names: Sequence[str],
    output: Path | None,
    **options: Any,
) -> int:
    """Replace this process by the program, with the tools in its environment.

    A program that Python does not run is a child process instead, whose exit status is returned.
    names: of the tools, in the output.  options: further fields of `Handed`.
    """
    command, python = command_of(program)
    output = None if output is None else _folder_for(output)
    shared = folder_of_ranks() if python else None
    try:
        folder = shared or tempfile.mkdtemp(prefix="amanda-")
    except OSError as error:
        raise SpecError(f"results of processes cannot be gathered: {error.strerror or error}") from None
    frameworks = driven_frameworks()
    handed = Handed(
        [(tool.name, dict(tool.given)) for tool in tools], folder, os.getpid(),
        None if output is None else str(output), frameworks, together=shared is not None,
        is_rank=is_in_rank(), nothing=[nothing(name, frameworks) for name in names], **options,
    )  # fmt: skip
    environment = dict(os.environ)
    handed.write_into(environment)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the shell may have closed it
            stream.flush()
    try:
        if python and os.name == "posix":
            os.execve(command[0], command, environment)
        return _supervise(command, environment, handed)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SpecError(f"{command[0]} cannot be run: {error.strerror}") from None


def _folder_for(output: Path) -> Path:
    """Make the folder for results; return its absolute path.

    Raises SpecError, before the program runs, if the folder cannot be made or written to.
    """
    try:
        place = output.absolute()
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return place
    except OSError as error:
        raise SpecError(f"results cannot be saved in {output}: {error.strerror}") from None


def _supervise(command: Sequence[str], environment: dict[str, str], handed: Handed) -> int:
    """Run a program as a child process; return its exit status, or end by the signal that ended the child."""
    from amanda.tools.command._gathering import tell_of_others

    arrived: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        # A terminal sends SIGINT to the child as well.
        if number == signal.SIGINT and os.isatty(0):
            return
        arrived.append(number)
        for child in children:
            child.send_signal(arrived.pop())

    before = {number: signal.signal(number, forward) for number in _SIGNALS}
    children.append(subprocess.Popen(command, env=environment))
    while arrived:
        children[0].send_signal(arrived.pop(0))
    status = children[0].wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    tell_of_others(handed)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _check_flags(program: Sequence[str]) -> None:
    """Raise SpecError for switches with which Python ignores PYTHONPATH or site."""
    arguments = iter(program)
    for argument in arguments:
        if not argument.startswith("-") or argument.startswith("--") or argument == "-":
            return
        for letter in argument[1:]:
            if letter in "mc":
                return
            if letter in "IES":
                flag = f"python -{letter}, which ignores PYTHONPATH or site"
                raise SpecError(f"tools cannot be applied under {flag}")
            if letter in _WITH_VALUE:
                if argument.endswith(letter):
                    next(arguments, None)
                break


def _is_script(path: Path) -> bool:
    """Return True for a Python file, and for a file that is not executable."""
    return path.suffix in (".py", ".pyc", ".pyz", ".pyw") or not os.access(path, os.X_OK)


def is_python(path: Path) -> bool:
    """Return True for a Python interpreter, and for a script whose first line names Python."""
    if path.resolve() == Path(sys.executable).resolve():
        return True
    with path.open("rb") as file:
        first = file.readline(256)
    return first.startswith(b"#!") and b"python" in first


def before_exec(leave: Callable[[bool], Callable[[], None]]) -> None:
    """Call `leave` whenever `exec` is about to replace the program of this process.

    leave: takes True if the next program runs under the tools; returns a function that withdraws the results
        that `leave` wrote, which is called if `exec` fails.
    """
    for name in ("execv", "execve"):  # which the others of the family call
        setattr(os, name, _leaving(getattr(os, name), leave))


def _leaving(original: Callable[..., Any], leave: Callable[[bool], Callable[[], None]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute(path: Any, argv: Any, *env: Any) -> Any:
        take_back = leave(_stays(path, *env)) if _can_be_run(path) else None
        try:
            return original(path, argv, *env)
        except BaseException:
            if take_back is not None:
                take_back()
            raise

    return execute


def _can_be_run(path: Any) -> bool:
    try:
        return Path(os.fsdecode(path)).is_file() and os.access(path, os.X_OK)
    except TypeError:  # an open file, by its number
        return True


def _stays(path: Any, env: Mapping[Any, Any] = os.environ) -> bool:
    """Return True if Python runs a program, in an environment that names tools."""
    try:
        return any(os.fsdecode(name) == VARIABLE for name in env) and is_python(Path(os.fsdecode(path)))
    except (TypeError, OSError, AttributeError):
        return False
