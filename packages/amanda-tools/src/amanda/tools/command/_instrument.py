"""`amanda instrument`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.text import Text

import amanda
from amanda.tools.command._config import configured
from amanda.tools.command._instrumented import InstrumentedResult
from amanda.tools.command._line import exit_status, limit_option, path_option, path_to_write, tool_option
from amanda.tools.command._spec import SpecError, Tooling, made
from amanda.tools.command._state import load_states
from amanda.tools.results import Result

_FORMS = (".csv", ".html", ".json", ".txt")
_STEPS = {"start", "end", "frequency"}


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@tool_option("A tool.")
@path_option("-o", "--output", told="The copy.", metavar="OUT", required=True)
@path_option("--config", told="Tools from TOML or YAML.")
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="[TOOL=]FILE",
    help="What a tool learnt: .npz, .safetensors, .json.",
)
@click.option(
    "--report", type=path_to_write(*_FORMS), metavar="FILE", help=f"What was done, as {', '.join(_FORMS)}."
)
@limit_option
@click.option("-f", "--force", is_flag=True, help="Replace OUT.")
@click.option("-q", "--quiet", is_flag=True, help="Do not tell what was done.")
def _command(
    model: Path,
    tools: Sequence[str],
    output: Path,
    config: Path | None,
    states: Sequence[str],
    report: Path | None,
    force: bool,
    quiet: bool,
) -> int:
    """Write a copy of a model's file with tools in it, which runs without Amanda.

    MODEL is an ONNX file, the folder of a SavedModel, or a file of torch.export; OUT is of the same kind.
    It is written at once or not at all, and only if all routines are tensor code.

    \b
    amanda instrument model.onnx -t prune:sparsity=0.5 -o pruned.onnx
    amanda instrument saved_model -t "prune:pattern=2:4" -t rewrite:rules=fold_batch_norm -o small
    amanda instrument model.pt2 -t quantize --state scales.safetensors -o quantized.pt2
    """
    specs = configured(config, tools, such_as="prune").tools
    for spec in specs:
        if steps := _STEPS & spec.given.keys():
            chosen = ", ".join(sorted(steps))
            raise SpecError(f"tool {spec.name}: {chosen} chooses steps, and a file has none")
    toolings = made(specs)
    load_states(states, toolings)
    with _ended_by_signal():
        done = amanda.instrument(
            model, *(one.tool for one in toolings), out=output, force=force, about=list(map(str, specs))
        )
    result = InstrumentedResult(done, model)
    if not quiet:
        _tell(result, toolings)
    for tooling in toolings:
        if tooling.out is not None:
            tooling.out.parent.mkdir(parents=True, exist_ok=True)
            getattr(tooling.tool, "result").save(tooling.out)  # noqa: B009
    if report is not None:
        result.save(report)
    sys.stdout.write(f"{output}\n")
    return 0


def instrument(arguments: Sequence[str] = ()) -> int:
    """Write a copy of a model's file with tools in it, which runs without Amanda."""
    return exit_status(_command, "amanda instrument", arguments)


def _tell(result: InstrumentedResult, toolings: Sequence[Tooling]) -> None:
    console = Console(file=sys.stderr, highlight=False)
    own = (getattr(one.tool, "result", None) for one in toolings)
    for one in (*(one for one in own if isinstance(one, Result) and one.rows()), result):
        console.print(one if console.is_terminal else Text(str(one)), soft_wrap=not console.is_terminal)


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Let SIGTERM end the process as an exception does, so that nothing is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
