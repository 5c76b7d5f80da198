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

import amanda
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
        """Parse the arguments in their long form, as `_in_long_form` gives it."""
        return super().parse_args(ctx, _in_long_form(args))


@click.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
@tool_option("A tool to apply.")
@click.option("--config", type=PATH, metavar="FILE", help="Tools from a TOML or YAML file.")
@click.option("-o", "--output", type=PATH, metavar="FOLDER", help="Save each result in this folder.")
# A thread can wait no longer than about 1e9 seconds.
@click.option("--every", type=OptionType(Annotated[float, Range(above=0, most=1e9)]), metavar="SECONDS",
              help="Also save results at this interval, in case the program is killed.")  # fmt: skip
@compiled_option
@click.option("--construction", is_flag=True,
              help="Also apply tools inside constructors and initializers of models.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Print no results.")
@click.option("--top", type=click.IntRange(min=1), metavar="N",
              help="Print N rows of each result, 15 by default.")  # fmt: skip
@click.option("--sort", default="", metavar="COLUMN", help="Print rows by this column, the largest first.")
@click.option("--depth", type=click.IntRange(min=1), metavar="N",
              help="Combine rows below N components of a module's path.")  # fmt: skip
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
    configuration = get_config(config, tools, example="amanda run flops PROGRAM, -t flops")
    if not program:
        raise SpecError("no program is given: a script, -m module, a command, or a model such as hf:llama")
    output = output or configuration.output
    if output is not None and output.exists() and not output.is_dir():
        raise SpecError(f"{output} is a file; results are saved in a folder")
    if full and top is not None:
        raise SpecError("--full shows every row; give --full or --top, not both")
    folders = _tool_folders(configuration.tools, program)
    # Made here so that errors come before the program starts.
    toolings = make_tools(configuration.tools, alone=True, folders=folders)
    for spec, tooling in zip(configuration.tools, toolings, strict=True):
        if tooling.out is not None:  # absolute, for processes that start in another folder
            spec.options["out"] = str(tooling.out)
    _check_column(sort, toolings)
    # Of a whole model people ask first which parts take most.
    is_tree = is_model(program[0]) and not sort and top is None
    view = {"top": top, "sort": sort, "depth": depth, "whole": full, "tree": is_tree}
    return launch(
        program, configuration.tools, toolings, output, quiet=quiet,
        view=view, every=every, compiled=compiled, construction=construction, tool_folders=folders,
    )  # fmt: skip


def _tool_folders(specs: Sequence[ToolSpec], program: Sequence[str]) -> list[str]:
    """Return the folders of a program's scripts, and the working directory, if a tool is an import path."""
    if not any("." in spec.name for spec in specs):
        return []
    script_folders = [Path(word).parent for word in program if word.endswith(".py")]
    return [str(folder.absolute()) for folder in (*script_folders, Path())]


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
    """Return the arguments in their long form: `-t` for each tool, `--` ahead of the program and its words.

    Options of `amanda run` and of a model may be on either side of the model's word.
    Raises SpecError for an option of models without a model.
    """
    # click would take a program's own options for those of `amanda run`, which therefore end first.
    # model_word is "" until a model is the program; its options are gathered in model_words.
    run_options, model_options = _options_with_values(_command), _options_with_values(model_command)
    remaining_words, run_words, model_words, model_word = list(arguments), list[str](), list[str](), ""
    while remaining_words:
        name = remaining_words[0].partition("=")[0]
        has_tools = any(argument.startswith(("-t", "--tool", "--config")) for argument in run_words)
        # `amanda run flops train.py`: the first word names tools, unless options have named them.
        if model_word or (name.startswith("-") and name not in ("-m", "-c", "--")):
            # With a model, an option that nobody knows is left to the model's command, which names the error.
            is_option_of_model = name in model_options or (model_word and name not in run_options)
            options = model_options if is_option_of_model else run_options
            # `--top 5` is two words, `--top=5` is one.
            word_count = 2 if options.get(remaining_words[0]) else 1
            (model_words if is_option_of_model else run_words).extend(remaining_words[:word_count])
            del remaining_words[:word_count]
        elif name in ("-m", "-c", "--") or has_tools or _is_program(remaining_words[0]):
            program = remaining_words[1:] if name == "--" else remaining_words
            if not (program and is_model(program[0])):  # the other words are the program's
                if model_words:
                    example = " ".join(["hf:bert", *model_words])
                    raise SpecError(
                        f"{model_words[0]} is an option of models, as in {example}; a program's own follow it"
                    )
                return [*run_words, "--", *program]
            model_word, *remaining_words = program
        else:
            run_words += [part for tool in split_tools(remaining_words.pop(0)) for part in ("-t", tool)]
    return [*run_words, "--", model_word, *model_words] if model_word else run_words


def _options_with_values(command: click.Command) -> dict[str, bool]:
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {name: not option.is_flag for option in options for name in option.opts}


def _is_program(word: str) -> bool:
    """Return True for a word that can only be a program: a model, or the path of a file."""
    return is_model(word) or Path(word).is_file() or word.endswith(".py") or os.sep in word.partition(":")[0]


# Switches of Python that have a value, as -W has.
_FLAGS_WITH_VALUE = "WXQ"
_WHAT_TO_GIVE = (
    "give a script, -m module, a command on PATH, or a model such as hf:llama, timm:resnet50 or FILE.onnx"
)
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


def find_command(program: Sequence[str], tools: Sequence[str] = ()) -> tuple[list[str], bool]:
    """Return the command line that runs a program, and True if Python runs it.

    `script.py ...`, `-m module ...`, `-c code ...` and further options are for this Python; another
    executable file, and the name of one on PATH, is run as it is.  A word of `amanda.tools.models`, such as
    `hf:llama`, is a program that runs the model.  tools: their names, for errors.
    Raises SpecError for a program that does not exist, and for switches that keep the tools out.
    """
    first_word = program[0]
    if first_word.startswith("-"):
        _check_python_flags(program)
        return [sys.executable, *program], True
    if is_model(first_word):
        return [sys.executable, "-m", "amanda.tools.models", *program], True
    path = Path(first_word)
    # A folder or a zip file with a __main__.py is a program to Python.
    is_script = path.suffix in (".py", ".pyc", ".pyz", ".pyw") or not os.access(path, os.X_OK)
    if path.is_dir() or (path.is_file() and is_script):
        return [sys.executable, *program], True
    executable = first_word if path.is_file() else shutil.which(first_word)
    if executable is None:
        script_by_stem = {script.stem: script for script in path.parent.glob("*.py")}
        close_stems = get_close_matches(path.stem, script_by_stem, n=1)
        hint = f"did you mean {script_by_stem[close_stems[0]]}?" if close_stems else ""
        if first_word.partition(":")[0] in (tool.name for tool in amanda.list_tools()):
            example = f"amanda run {','.join([*tools, first_word])} {' '.join(program[1:])}"
            raise SpecError(f"{first_word!r} is a tool, not a program; join tools by commas: {example}")
        raise SpecError(f"there is no {first_word!r}; {hint or _WHAT_TO_GIVE}")
    return [executable, *program[1:]], is_python(Path(executable))


def launch(
    program: Sequence[str], specs: Sequence[ToolSpec], toolings: Sequence[Tooling], output: Path | None,
    **options: Any,
) -> int:  # fmt: skip
    """Replace this process by the program, by `exec`, with the tools in its environment.

    On Windows, and if Python does not run it, the program is a child, whose exit status is returned.
    toolings: the tools of the specs.  output: folder for results.  options: further fields of `RunSettings`.
    Raises SpecError for a folder that cannot be made, and for a program that cannot be run.
    """
    command, is_run_by_python = find_command(program, [spec.name for spec in specs])
    output = None if output is None else _make_results_folder(output)
    shared_folder = folder_of_ranks() if is_run_by_python else None
    try:
        folder = shared_folder or tempfile.mkdtemp(prefix="amanda-")
    except OSError as error:
        raise SpecError(f"results of processes cannot be gathered: {error.strerror or error}") from None
    frameworks = driven_frameworks()
    # Then nobody is told that no op ran: a program that is asked for its options runs none, and a model that
    # runs none has failed, and has said why.
    may_run_no_op = is_model(program[0]) or not {"-h", "--help"}.isdisjoint(program)
    settings = RunSettings(
        tools=[(tool.name, dict(tool.options)) for tool in specs], folder=folder, root=os.getpid(),
        output=None if output is None else str(output), frameworks=frameworks,
        together=shared_folder is not None, is_rank=is_in_rank(), **options,
        no_op_texts=[] if may_run_no_op else [no_op_text(tool.name, frameworks) for tool in toolings],
    )  # fmt: skip
    environment = dict(os.environ)
    settings.write_into(environment)
    # exec drops what is still in the buffers.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the shell may have closed it
            stream.flush()
    try:
        # The program keeps our process id, so signals and exit status are its own.
        if is_run_by_python and os.name == "posix":
            os.execve(command[0], command, environment)
        return _supervise(command, environment, settings, toolings)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SpecError(f"{command[0]} cannot be run: {error.strerror}") from None


def _make_results_folder(output: Path) -> Path:
    """Make the folder for results; return its absolute path.  Raises SpecError if it cannot be written to."""
    try:
        folder = output.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # A trial, since permissions do not tell: a read-only file system refuses as well.
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise SpecError(f"results cannot be saved in {output}: {error.strerror}") from None


def _supervise(
    command: Sequence[str], environment: dict[str, str], settings: RunSettings, toolings: Sequence[Tooling]
) -> int:
    """Run a program as a child, pass signals on, report results; return its status, or die of its signal."""
    from amanda.tools.command._gathering import report_other_processes

    pending_signals: list[int] = []
    # Empty, then the one child: a signal may arrive before Popen has returned.
    started_children: list[subprocess.Popen[bytes]] = []

    def forward_signal(number: int, frame: FrameType | None) -> None:
        """Send a signal on to the child, at once or when it has started, but for a SIGINT of a terminal."""
        # A terminal sends SIGINT to the child as well.
        if number == signal.SIGINT and os.isatty(0):
            return
        pending_signals.append(number)
        for child in started_children:
            child.send_signal(pending_signals.pop())

    previous_handlers = {number: signal.signal(number, forward_signal) for number in _SIGNALS}
    started_children.append(subprocess.Popen(command, env=environment))
    while pending_signals:
        started_children[0].send_signal(pending_signals.pop(0))
    status = started_children[0].wait()
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)
    # A program that failed has said why, and need not be told that it executed no op.
    report_other_processes(replace(settings, no_op_texts=[]) if status else settings, toolings)
    if status < 0:
        # Shells tell a death by signal from an exit status, so we die of the same one.
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _check_python_flags(program: Sequence[str]) -> None:
    """Raise SpecError for switches ahead of a program with which Python ignores PYTHONPATH or site."""
    arguments = iter(program)
    for word in arguments:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return
        for letter in word[1:]:
            if letter in "mc":  # the program follows
                return
            if letter in "IES":  # isolated, no environment, no site
                flag = f"python -{letter}, which ignores PYTHONPATH or site"
                raise SpecError(f"tools cannot be applied under {flag}")
            # The value is the rest of the word, or the next word.
            if letter in _FLAGS_WITH_VALUE:
                if word.endswith(letter):
                    next(arguments, None)
                break
