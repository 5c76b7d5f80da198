"""Magics of IPython and Jupyter: `%load_ext amanda`, then `%%amanda flops` above a cell."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.command import SpecError, Tooling, ToolSpec, made, split_tools
from amanda.tools.select import leave_construction

__all__ = ["load_ipython_extension"]

RESULTS = "amanda_results"
"""Variable of the notebook with the results of the last magic, by the tools' names."""


def load_ipython_extension(shell: Any) -> None:
    """Register the magic `amanda` in a shell of IPython."""

    def magic(line: str, cell: str | None = None) -> None:
        """Run a line or a cell under tools, and show their results.

        %amanda TOOL,TOOL STATEMENT
        %%amanda TOOL[:OPTION=VALUE,...][,TOOL...]
        """
        words, _, statement = line.strip().partition(" ")
        try:
            tools = made([ToolSpec.parse(spec) for spec in split_tools(words)]) if words else []
            if not tools:
                raise SpecError("no tool is given: %%amanda flops, or %amanda flops model(x)")
            if cell is not None and statement.strip():
                raise SpecError(f"{statement.strip()!r} follows the tools: give tools with commas, flops,nan")
        except AmandaError as error:  # of one line, without a traceback
            sys.stderr.write(f"amanda: {error}\n")
            return
        # Unless a phase is selected, tools leave out the ops that construct models, as under `amanda run`.
        for tooling in tools:
            if tooling.phase is None:
                leave_construction(tooling.tool)
        with amanda.apply(*(tooling.tool for tooling in tools)):
            # IPython runs the cell, so that displays, history and tracebacks are as without tools.
            shell.run_cell(statement if cell is None else cell)
        _show(shell, tools)

    shell.register_magic_function(magic, "line_cell", "amanda")


def _show(shell: Any, tools: Iterable[Tooling]) -> None:
    """Display each result, and keep it in the notebook; save it where the option `out` is given."""
    display: Any = import_module("IPython.display").display
    results = {}
    for tooling in tools:
        result = getattr(tooling.tool, "result", None)
        if result is None:
            continue
        results[tooling.name] = result
        display(result)
        if tooling.out is not None:
            result.save(tooling.home / tooling.out)
    shell.user_ns[RESULTS] = results
