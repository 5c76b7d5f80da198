"""`amanda run`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import click

from amanda.options import Range
from amanda.tools.command._config import configured
from amanda.tools.command._launch import launch
from amanda.tools.command._line import PATH, OptionType, compiled_option, exit_status, tool_option
from amanda.tools.command._spec import SpecError, made, split_tools
from amanda.tools.models import is_model


@click.command(context_settings={"allow_interspersed_args": False})
@tool_option("A tool to apply.")
@click.option("--config", type=PATH, metavar="FILE", help="Tools from a TOML or YAML file.")
@click.option("-o", "--output", type=PATH, metavar="FOLDER", help="Save each result in this folder.")
@click.option(
    "--every",
    type=OptionType(Annotated[float, Range(above=0, most=1e9)]),  # longer than a thread can wait
    metavar="SECONDS",
    help="Save results as they are so far, too, for processes that are killed.",
)
@compiled_option
@click.option(
    "--construction",
    is_flag=True,
    help="Apply tools to what makes models too: constructors and initializers.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print no results.")
@click.option("--full", is_flag=True, help="Print every row and column of results.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def _command(
    tools: Sequence[str],
    config: Path | None,
    output: Path | None,
    every: float | None,
    compiled: str,
    construction: bool,
    quiet: bool,
    full: bool,
    program: Sequence[str],
) -> int:
    """Run an unmodified program, or a model by its name, under tools.

    PROGRAM is a script with its arguments, `-m module`, or a command such as torchrun.  Its output, exit
    status and signals are its own; results are printed to standard error when it ends.

    \b
    amanda run flops,profile train.py --epochs 1
    amanda run -t flops -- train.py --epochs 1
    amanda run -t "flops:module=layer4,out=flops.csv" -t nan:stop -- -m package
    amanda run --config amanda.toml -- torchrun --nproc-per-node 2 train.py
    amanda run flops timm:resnet50 --input-shape 8,3,224,224

    Models are hf:TYPE or hf:CONFIG.json (of transformers), timm:NAME, torch:MODULE:FUNCTION, keras:NAME and
    FILE.onnx, with random weights and inputs; `amanda run flops hf:bert --help` lists their options.

    `amanda tools` lists the tools, `amanda info TOOL` their options. Of every tool: type, module, phase
    (of the ops it acts on), start, end, frequency (of steps), out (a file for its result).
    """
    settings = configured(config, tools, such_as="amanda run flops PROGRAM, -t flops")
    if not program:
        raise SpecError("no program is given: a script, -m module, a command, or a model such as hf:llama")
    output = output or settings.output
    if output is not None and output.exists() and not output.is_dir():
        raise SpecError(f"{output} is a file; results are saved in a folder")
    toolings = made(settings.tools)  # so that errors come before the program starts
    return launch(
        program, settings.tools, [tooling.name for tooling in toolings], output,
        quiet=quiet, full=full, every=every, compiled=compiled, construction=construction,
    )  # fmt: skip


def run(arguments: Sequence[str] = ()) -> int:
    """Run an unmodified program under tools."""
    return exit_status(_command, "amanda run", _separated(arguments))


def _separated(arguments: Sequence[str]) -> list[str]:
    """Return the arguments in their long form: `-t` for each tool, `--` ahead of the program."""
    options = [parameter for parameter in _command.params if isinstance(parameter, click.Option)]
    valued = {name for option in options if not option.is_flag for name in option.opts}
    waiting = list(arguments)
    ours: list[str] = []
    while waiting and waiting[0] != "--":
        if waiting[0] in ("-m", "-c"):
            return [*ours, "--", *waiting]
        if not waiting[0].startswith("-"):
            names_tools = any(argument.startswith(("-t", "--tool", "--config")) for argument in ours)
            if names_tools or _is_program(waiting[0]):
                return [*ours, "--", *waiting]
            ours += [part for tool in split_tools(waiting.pop(0)) for part in ("-t", tool)]
            continue
        ours.append(waiting.pop(0))
        if ours[-1] in valued and waiting:
            ours.append(waiting.pop(0))
    return [*ours, *waiting]


def _is_program(word: str) -> bool:
    """Return True for a word that can only be a program: a model, or the path of a file."""
    return is_model(word) or Path(word).is_file() or word.endswith(".py") or os.sep in word.partition(":")[0]
