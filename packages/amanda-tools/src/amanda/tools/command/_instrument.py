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
from amanda.errors import AmandaError, ArtefactError
from amanda.tools.command._config import Config, read_config
from amanda.tools.command._instrumented import InstrumentedResult
from amanda.tools.command._spec import SpecError, Tooling, ToolSpec, combined, made
from amanda.tools.command._state import load_states
from amanda.tools.results import Result

_FORMS = (".csv", ".html", ".json", ".txt")
_STEPS = {"start", "end", "frequency"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-t", "--tool", "tools", multiple=True, metavar="TOOL[:OPTION=VALUE,...]", help="A tool.")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="OUT", help="The copy."
)
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="Tools from TOML or YAML.")
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="[TOOL=]FILE",
    help="What a tool learnt: .npz, .safetensors, .json.",
)
@click.option(
    "--report", type=click.Path(path_type=Path), metavar="FILE", help="What was done, as .json, .csv, .html."
)
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
    settings = Config() if config is None else read_config(config)
    specs = combined(settings.tools, [ToolSpec.parse(text) for text in tools])
    if not specs:
        raise SpecError("no tool is given: -t prune, or --config FILE; `amanda tools` lists them")
    for spec in specs:
        if steps := _STEPS & spec.given.keys():
            raise SpecError(
                f"tool {spec.name}: {', '.join(sorted(steps))} chooses steps, and a file has none"
            )
    if report is not None and report.suffix not in _FORMS:
        raise SpecError(f"--report: {report} ends in none of {', '.join(_FORMS)}")
    toolings = made(specs)
    load_states(states, toolings)
    with _ended_by_signal():
        done = amanda.instrument(
            model,
            *(one.tool for one in toolings),
            out=output,
            force=force,
            about=[_text(one) for one in specs],
        )
    result = InstrumentedResult(done, model)
    if not quiet:
        _tell(result, toolings)
    for tooling in toolings:
        if tooling.out is not None:
            getattr(tooling.tool, "result").save(tooling.out)  # noqa: B009
    if report is not None:
        result.save(report)
    sys.stdout.write(f"{output}\n")
    return 0


def instrument(arguments: Sequence[str] = ()) -> int:
    """Write a copy of a model's file with tools in it, which runs without Amanda."""
    try:
        return int(_command.main(list(arguments), "amanda instrument", standalone_mode=False) or 0)
    except click.Abort:  # what click makes of KeyboardInterrupt
        return _said("interrupted; nothing was written", 130)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except AmandaError as error:
        return _said("\n".join([str(error), *_notes(error)]), 1 if isinstance(error, ArtefactError) else 2)
    except OSError as error:
        return _said(f"{error.filename or ''}: {error.strerror or error}", 1)
    except Exception as error:
        if not _notes(error):  # it is of no tool
            raise
        return _said("\n".join([f"{type(error).__name__}: {error}", *_notes(error)]), 1)


def _notes(error: Exception) -> list[str]:
    """At which op, and in which tool, it was raised."""
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("[amanda]")]


def _said(text: str, status: int) -> int:
    sys.stderr.write(f"amanda instrument: {text}\n")
    return status


def _tell(result: InstrumentedResult, toolings: Sequence[Tooling]) -> None:
    console = Console(file=sys.stderr, highlight=False)
    own = [getattr(one.tool, "result", None) for one in toolings]
    for one in (*(one for one in own if isinstance(one, Result) and one.rows()), result):
        console.print(one if console.is_terminal else Text(str(one)), soft_wrap=not console.is_terminal)


def _text(spec: ToolSpec) -> str:
    """A tool as it was given."""
    given = [
        f"{name}={'+'.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in spec.given.items()
    ]
    return f"{spec.name}:{','.join(given)}" if given else spec.name


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
