"""`amanda run`: its options, and the start of the program under tools."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import click

from amanda.errors import did_you_mean
from amanda.options import Range
from amanda.plugins import driven_frameworks
from amanda.tools.command._line import PATH, OptionType, compiled_option, exit_status, get_config, tool_option
from amanda.tools.command._processes import RunSettings, folder_of_ranks, is_in_rank, is_python, no_op_text
from amanda.tools.command._specs import SpecError, Tooling, ToolSpec, make_tools, split_tools
from amanda.tools.models import is_model
from amanda.tools.models.__main__ import command as model_command
from amanda.tools.results import Result


class _RunCommand(click.Command):
    """A command that takes tools as its first word, and a program after its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments in their long form."""
        return super().parse_args(ctx, _in_long_form(args))


@click.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
@tool_option("A tool to apply.")
@click.option("--config", type=PATH, metavar="FILE", help="Tools from a TOML or YAML file.")
@click.option("-o", "--output", type=PATH, metavar="FOLDER", help="Save each result in this folder.")
@click.option(
    "--every",
    type=OptionType(Annotated[float, Range(above=0, most=1e9)]),  # longer than a thread can wait
    metavar="SECONDS",
    help="Also save results at this interval, in case the program is killed.",
)
@compiled_option
@click.option(
    "--construction", is_flag=True, help="Also apply tools inside constructors and initializers of models."
)
@click.option("-q", "--quiet", is_flag=True, help="Print no results.")
@click.option(
    "--top", type=click.IntRange(min=1), metavar="N", help="Print N rows of each result, 15 by default."
)
@click.option("--sort", default="", metavar="COLUMN", help="Print rows by this column, the largest first.")
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    metavar="N",
    help="Combine rows below N components of a module's path.",
)
@click.option("--full", is_flag=True, help="Print every row and column of results.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def _command(
    tools: Sequence[str], config: Path | None, output: Path | None, every: float | None, compiled: str,
    construction: bool, quiet: bool, top: int | None, sort: str, depth: int | None, full: bool,
    program: Sequence[str],
) -> int:  # fmt: skip
    """Run an unmodified program, or a model by its name, under tools.

    PROGRAM is a script with its arguments, `-m module`, or a command such as torchrun.  Its output, exit
    status and signals are its own; results are printed to standard error when it ends.

    \b
    amanda run flops,profile train.py --epochs 1
    amanda run -t flops -- train.py --epochs 1
    amanda run -t "flops:module=layer4,out=flops.csv" -t nan:stop -- -m package
    amanda run --config amanda.toml -- torchrun --nproc-per-node 2 train.py
    amanda run flops timm:resnet50 --input-shape 8,3,224,224

    Models are hf:TYPE, hf:CONFIG.json or hf:CHECKPOINT (of transformers), timm:NAME, torch:MODULE:FUNCTION,
    keras:NAME and FILE.onnx, on random inputs; `amanda run flops hf:bert --help` lists options of models.

    `amanda tools` lists the tools, `amanda info TOOL` their options. Every tool also takes type, module and
    phase (which ops), start, end and frequency (which steps), and out (a file for its result).
    """
    configuration = get_config(config, tools, such_as="amanda run flops PROGRAM, -t flops")
    if not program:
        raise SpecError("no program is given: a script, -m module, a command, or a model such as hf:llama")
    output = output or configuration.output
    if output is not None and output.exists() and not output.is_dir():
        raise SpecError(f"{output} is a file; results are saved in a folder")
    if full and top is not None:
        raise SpecError("--full shows every row; give --full or --top, not both")
    toolings = make_tools(configuration.tools, alone=True)  # so that errors come before the program starts
    for spec, tooling in zip(configuration.tools, toolings, strict=True):
        if tooling.out is not None:  # absolute, for processes that start in another folder
            spec.options["out"] = str(tooling.out)
    _check_column(sort, toolings)
    # Of a whole model people ask first which parts take most.
    is_tree = is_model(program[0]) and not sort and top is None
    view = {"top": top, "sort": sort, "depth": depth, "whole": full, "tree": is_tree}
    return launch(
        program, configuration.tools, [tooling.name for tooling in toolings], output,
        quiet=quiet, view=view, every=every, compiled=compiled, construction=construction,
    )  # fmt: skip


def _check_column(name: str, toolings: Sequence[Tooling]) -> None:
    """Raise SpecError for a column that the result of no tool has."""
    results = [getattr(tooling.tool, "result", None) for tooling in toolings]
    tables = [result for result in results if isinstance(result, Result)]
    if name and not any(result._has_column(name) for result in tables):
        names = [column.name for result in tables for column in result.columns]
        raise SpecError(f"--sort {name}: no result has such a column; {did_you_mean(name, names)}")


def run(arguments: Sequence[str] = ()) -> int:
    """Run an unmodified program under tools."""
    return exit_status(_command, "amanda run", arguments)


def _in_long_form(arguments: Sequence[str]) -> list[str]:
    """Return the arguments in their long form: `-t` for each tool, `--` ahead of the program.

    Options of `amanda run` and of a model may be on either side of the model's word.
    Raises SpecError for an option of models without a model.
    """
    # click would take a program's own options for those of `amanda run`, which therefore end first.
    run_options, model_options = _options_with_values(_command), _options_with_values(model_command)
    waiting, run_words, model_words, word = list(arguments), list[str](), list[str](), ""
    while waiting:
        name = waiting[0].partition("=")[0]
        names_tools = any(argument.startswith(("-t", "--tool", "--config")) for argument in run_words)
        # `amanda run flops train.py`: the first word names tools, unless options have named them.
        if word or (name.startswith("-") and name not in ("-m", "-c", "--")):
            is_of_model = name in model_options or (word and name not in run_options)
            options = model_options if is_of_model else run_options
            count = 2 if options.get(waiting[0]) else 1
            (model_words if is_of_model else run_words).extend(waiting[:count])
            del waiting[:count]
        elif name in ("-m", "-c", "--") or names_tools or _is_program(waiting[0]):
            program = waiting[1:] if name == "--" else waiting
            if not (program and is_model(program[0])):
                if model_words:
                    example = " ".join(["hf:bert", *model_words])
                    raise SpecError(
                        f"{model_words[0]} is an option of models, as in {example}; a program's own follow it"
                    )
                return [*run_words, "--", *program]
            word, *waiting = program
        else:
            run_words += [part for tool in split_tools(waiting.pop(0)) for part in ("-t", tool)]
    return [*run_words, "--", word, *model_words] if word else run_words


def _options_with_values(command: click.Command) -> dict[str, bool]:
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {name: not option.is_flag for option in options for name in option.opts}


def _is_program(word: str) -> bool:
    """Return True for a word that can only be a program: a model, or the path of a file."""
    return is_model(word) or Path(word).is_file() or word.endswith(".py") or os.sep in word.partition(":")[0]


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
    # A folder or a zip file with a __main__.py is a program to Python.
    is_script = path.suffix in (".py", ".pyc", ".pyz", ".pyw") or not os.access(path, os.X_OK)
    if path.is_dir() or (path.is_file() and is_script):
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
    names: of the tools, in the output.  options: further fields of `RunSettings`.
    Raises SpecError for a folder that cannot be made, and for a program that cannot be run.
    """
    command, python = command_of(program)
    output = None if output is None else _folder_for(output)
    shared = folder_of_ranks() if python else None
    try:
        folder = shared or tempfile.mkdtemp(prefix="amanda-")
    except OSError as error:
        raise SpecError(f"results of processes cannot be gathered: {error.strerror or error}") from None
    frameworks = driven_frameworks()
    # A program that is asked for its options executes no op, and need not be told so.  A model that executes
    # none has failed, and has said why.
    is_expected = is_model(program[0]) or not {"-h", "--help"}.isdisjoint(program)
    settings = RunSettings(
        tools=[(tool.name, dict(tool.options)) for tool in tools], folder=folder, root=os.getpid(),
        output=None if output is None else str(output), frameworks=frameworks, together=shared is not None,
        is_rank=is_in_rank(),
        no_op_texts=[] if is_expected else [no_op_text(name, frameworks) for name in names], **options,
    )  # fmt: skip
    environment = dict(os.environ)
    settings.write_into(environment)
    # exec drops what is still in the buffers.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the shell may have closed it
            stream.flush()
    try:
        # The program keeps our process id, so signals and exit status are its own.
        if python and os.name == "posix":
            os.execve(command[0], command, environment)
        return _supervise(command, environment, settings)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SpecError(f"{command[0]} cannot be run: {error.strerror}") from None


def _folder_for(output: Path) -> Path:
    """Make the folder for results; return its absolute path.  Raises SpecError ahead of the program."""
    try:
        folder = output.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions do not tell: a read-only file system refuses as well.
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise SpecError(f"results cannot be saved in {output}: {error.strerror}") from None


def _supervise(command: Sequence[str], environment: dict[str, str], settings: RunSettings) -> int:
    """Run a program as a child process; return its exit status, or end by the signal that ended the child."""
    from amanda.tools.command._gathering import report_other_processes

    arrived: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        """Send a signal on to the child, at once or when it has started."""
        # A terminal sends SIGINT to the child as well.
        if number == signal.SIGINT and os.isatty(0):
            return
        # A signal may arrive before the child has started.
        arrived.append(number)
        for child in children:
            child.send_signal(arrived.pop())

    previous_handlers = {number: signal.signal(number, forward) for number in _SIGNALS}
    children.append(subprocess.Popen(command, env=environment))
    while arrived:
        children[0].send_signal(arrived.pop(0))
    status = children[0].wait()
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)
    # A program that failed has said why, and need not be told that it executed no op.
    report_other_processes(replace(settings, no_op_texts=[]) if status else settings)
    if status < 0:
        # Shells tell a death by signal from an exit status, so we die of the same one.
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
            # The value is the rest of the word, or the next word.
            if letter in _WITH_VALUE:
                if argument.endswith(letter):
                    next(arguments, None)
                break
