"""Magics of IPython and Jupyter: `%load_ext amanda`, then `%%amanda flops` above a cell."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import amanda
from amanda.errors import AmandaError
from amanda.tools.command import SpecError, Tooling, ToolSpec, make_tools, split_tools, strip_traceback
from amanda.tools.select import leave_construction

__all__ = ["load_ipython_extension"]

RESULTS = "amanda_results"
"""Variable of the notebook with the results of the last magic, by the tools' names."""


class CellError(AmandaError):
    """A cell under tools raised an error, which IPython has shown and does not count as one of the magic."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: no second traceback."""
        return [f"amanda: {self}"]


def load_ipython_extension(shell: Any) -> None:
    """Register the magic `amanda` in a shell of IPython."""

    def magic(line: str, cell: str | None = None) -> None:
        """Run a line or a cell under tools, and show their results.

        %amanda TOOL,TOOL STATEMENT
        %%amanda TOOL[:OPTION=VALUE,...][,TOOL...]
        """
        tools_text, _, statement = line.strip().partition(" ")
        try:
            tools = make_tools(map(ToolSpec.parse, split_tools(tools_text)), alone=True) if tools_text else []
            if not tools:
                raise SpecError("no tool is given: %%amanda flops, or %amanda flops model(x)")
            if cell is not None and statement.strip():
                raise SpecError(f"{statement.strip()!r} follows the tools: give tools with commas, flops,nan")
        except AmandaError as error:
            # IPython's own error of a magic is shown as one line, and "Run All" stops at its cell.
            raise import_module("IPython.core.error").UsageError(f"amanda: {error}") from None
        # Unless a phase is selected, tools leave out the ops that construct models, as under `amanda run`.
        for tooling in tools:
            if tooling.phase is None:
                leave_construction(tooling.tool)
        show_traceback = shell.showtraceback

        def show_program_alone(*arguments: Any, **options: Any) -> None:
            """Show the traceback of the cell's error without Amanda's frames, as `amanda run` does."""
            strip_traceback(sys.exc_info()[1])
            show_traceback(*arguments, **options)

        # IPython runs the cell, so that displays and history are as without tools.  Displaying a tensor
        # computes with it, which is no part of the cell.
        with (
            amanda.apply(*(tooling.tool for tooling in tools)),
            patch.object(
                shell.display_formatter, "format", amanda.disabled()(shell.display_formatter.format)
            ),
            patch.object(shell, "showtraceback", show_program_alone),
        ):
            execution = shell.run_cell(statement if cell is None else cell)
        _show(shell, tools)
        cause = execution.error_before_exec or execution.error_in_exec
        if cause is not None:
            raise CellError(f"the cell raised {type(cause).__name__}, shown above")

    shell.register_magic_function(magic, "line_cell", "amanda")


def _show(shell: Any, tools: Iterable[Tooling]) -> None:
    """Display each tool's result, if any, keep it in RESULTS, and save it with the option `out`."""
    display: Any = import_module("IPython.display").display
    results = {}
    for tooling in tools:
        result = getattr(tooling.tool, "result", None)
        if result is None:
            continue
        results[tooling.name] = result
        display(result)
        if tooling.out is not None:
            result.save(tooling.out)
    shell.user_ns[RESULTS] = results
