"""`amanda instrument`: its options, the states that tools load before, and the table of what was inserted."""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import click

import amanda
from amanda import Instrumented
from amanda.tools.command._gathering import Printer
from amanda.tools.command._line import PATH, exit_status, get_config, limit_option, path_to_write, tool_option
from amanda.tools.command._specs import SpecError, Tooling, make_tools
from amanda.tools.results import Column, Result, check_file, parsing, read_npz

_FORMS, _STATE_SUFFIXES = (".csv", ".html", ".json", ".txt"), (".npz", ".safetensors")
_STEP_SELECTORS = {"start", "end", "frequency"}


@click.command()
@click.argument("model", type=PATH)
@tool_option("A tool.")
@click.option("-o", "--output", type=PATH, metavar="OUT", required=True, help="The copy.")
@click.option("--config", type=PATH, metavar="FILE", help="Tools from TOML or YAML.")
@click.option("--state", "states", multiple=True, metavar="[TOOL=]FILE",
              help="Saved state of a tool (scales, masks): .npz, .safetensors, .json.")  # fmt: skip
@click.option("--report", type=path_to_write(*_FORMS), metavar="FILE",
              help=f"What was done, as {', '.join(_FORMS)}.")  # fmt: skip
@limit_option
@click.option("-f", "--force", is_flag=True, help="Replace OUT.")
@click.option("-q", "--quiet", is_flag=True, help="Print no summary.")
def _command(
    model: Path, tools: Sequence[str], output: Path, config: Path | None, states: Sequence[str],
    report: Path | None, force: bool, quiet: bool,
) -> int:  # fmt: skip
    """Write a copy of a model's file with tools in it, which runs without Amanda.

    MODEL is an ONNX file, the folder of a SavedModel, or a file of torch.export; OUT has the same format.
    OUT is written completely or not at all, and only if all routines of the tools are tensor code.

    \b
    amanda instrument model.onnx -t prune:sparsity=0.5 -o pruned.onnx
    amanda instrument saved_model -t "prune:pattern=2:4" -t rewrite:rules=fold_batch_norm -o small
    amanda instrument model.pt2 -t quantize --state scales.safetensors -o quantized.pt2
    """
    specs = get_config(config, tools, example="-t prune").tools
    for spec in specs:
        # A file is run by programs that count no steps, so a window of steps would be open for good.
        if steps := _STEP_SELECTORS & spec.options.keys():
            selectors = ", ".join(sorted(steps))
            raise SpecError(f"tool {spec.name}: {selectors} chooses steps, and a file has none")
    toolings = make_tools(specs, folders=[""])  # as Python calls the working directory
    load_states(states, toolings)
    with _exit_on_sigterm():
        tools_to_write, about = [tooling.tool for tooling in toolings], list(map(str, specs))
        instrumented = amanda.instrument(model, *tools_to_write, out=output, force=force, about=about)
    result, printer = InstrumentedResult(instrumented, model), Printer(quiet)
    results: list[Any] = [getattr(tooling.tool, "result", None) for tooling in toolings]
    # Most tools of a file have nothing to report: they never ran.
    tables = [value for value in results if isinstance(value, Result) and value.rows()]
    for table in (*tables, result):
        printer.show(table)
    for tooling, tool_result in zip(toolings, results, strict=True):
        if tooling.out is not None:
            tool_result.save(tooling.out)
    if report is not None:
        result.save(report)
    sys.stdout.write(f"{output}\n")
    return 0


def instrument(arguments: Sequence[str] = ()) -> int:
    """Write a copy of a model's file with tools in it, which runs without Amanda."""
    return exit_status(_command, "amanda instrument", arguments)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Convert SIGTERM to SystemExit in a context of the main thread, so that temporary files are removed."""
    # Handlers can be set on the main thread alone; on another SIGTERM keeps its handler.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit_with_status(number: int, frame: FrameType | None) -> None:
        # The status by which shells report a death by signal.
        sys.exit(128 + number)

    previous_handler = signal.signal(signal.SIGTERM, exit_with_status)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def load_states(texts: Sequence[str], toolings: Sequence[Tooling]) -> None:
    """Load the state of each tool that a text "TOOL=FILE" names; "FILE" is for the only tool.

    A tool's own `load` reads the file; without one, `load_state_dict` takes the arrays of the file.
    Raises SpecError for a file that cannot be read, and for an unknown tool.
    """
    tooling_by_name = {tooling.name: tooling for tooling in toolings}
    for text in texts:
        name, equals, file = text.partition("=")
        # The whole text may be a file, whose name may have "=" in it.
        if (not equals or name not in tooling_by_name) and len(toolings) == 1:
            file, name = text, toolings[0].name
        if name not in tooling_by_name:
            raise SpecError(f"--state {text}: give TOOL=FILE, TOOL one of {', '.join(tooling_by_name)}")
        tool, path = tooling_by_name[name].tool, Path(file)
        # A tool that saves more than arrays reads its own files, and checks them.
        load = getattr(tool, "load", None)
        try:
            if load is not None:
                load(path)
            else:
                tool.load_state_dict(read_arrays(path))
        except Exception as error:  # a crafted file may raise any
            reason = str(error)
            if path.name not in reason:
                reason = f"{path} is no state of {name} that can be read: {reason}"
            raise SpecError(f"--state {text}: {reason}") from error


def read_arrays(path: Path) -> Mapping[str, Any]:
    """Return arrays by name, running no code of the file; raise SpecError but for .npz and .safetensors."""
    with parsing(path, f"{path.suffix} file of plain arrays", SpecError):
        if path.suffix == ".npz":
            return read_npz(path)
        if path.suffix == ".safetensors":
            check_file(path)
            from safetensors.numpy import load_file

            return load_file(path)
    raise SpecError(f"it ends in none of {', '.join(_STATE_SUFFIXES)}")


class InstrumentedResult(Result):
    """Result of `amanda instrument`: by type of op and tool, the numbers of routines that are in the copy."""

    name: ClassVar[str] = "instrument"
    columns: ClassVar[Sequence[Column]] = (
        Column("type"), Column("tool"),
        *(Column(place, total=True) for place in ("before", "instead", "after", "stored")),
    )  # fmt: skip

    def __init__(self, instrumented: Instrumented, model: Path) -> None:
        self.title = f"{instrumented.kind} {instrumented.path}"
        self._instrumented, self._model = instrumented, model

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return types and tools with their numbers of routines; stored ones are counted as stored alone."""
        # The value of a stored routine was computed now: it is a constant of the copy.
        routines = self._instrumented.inlined
        counts = Counter(
            (routine.type, routine.tool, "stored" if routine.stored else _PLACE_BY_ACTION[routine.action])
            for routine in routines
        )
        places = [column.name for column in self.columns[2:]]
        # dict.fromkeys keeps the order of the graph, which a set would lose.
        kinds = dict.fromkeys((routine.type, routine.tool) for routine in routines)
        return [(type, tool, *(counts[type, tool, place] for place in places)) for type, tool in kinds]

    def notes(self) -> Sequence[str]:
        """Return sentences on the number of ops, stored routines, and ops that could not be instrumented."""
        instrumented = self._instrumented
        is_any_stored = any(routine.stored for routine in instrumented.inlined)
        stored_notes = ["Stored is what a routine makes of constants alone: it was computed now."]
        copy_text = f"; the copy has {len(instrumented.inlined)} routines" if instrumented.inlined else ""
        return [
            f"{instrumented.analysed} ops of {self._model} were analysed{copy_text}.",
            *(stored_notes if is_any_stored else []),
            *(f"Not instrumented: {op.what}: {op.reason}." for op in instrumented.left),
        ]

    def _facts(self) -> Mapping[str, Any]:
        """Return the paths of both files, each routine, and each op that could not be instrumented."""
        return {
            "model": str(self._model), "out": str(self._instrumented.path), "kind": self._instrumented.kind,
            "analysed": self._instrumented.analysed,
            "routines": [routine._asdict() for routine in self._instrumented.inlined],
            "left": [skipped._asdict() for skipped in self._instrumented.left],
        }  # fmt: skip


_PLACE_BY_ACTION = {"insert_before_op": "before", "replace_op": "instead", "insert_after_op": "after"}
