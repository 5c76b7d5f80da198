"""Cells: calls are regions of the program, compiled cells are reported, recomputed ones have the same ids."""

from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

from amanda.backend import (
    Patches,
    bind_to_current_place,
    hide_ops,
    path_of_call,
    place_by_path,
    recomputable,
    type_as_path,
)
from mindspore import nn
from mindspore.graph import api

_METHODS = ("__call__", "_complex_call", "_run_construct")


def enclose_cells(patches: Patches) -> None:
    """Make each call of a cell a region, to which the ops in it belong."""
    patches.track_module_calls(nn.Cell, place_by_path(_path_within), _METHODS)


def cell_path(subjects: Sequence[Any]) -> str:
    """Return the path from the first cell to the last, as in `cells_and_names`: "layer1.0.conv1"."""
    return path_of_call(subjects, _path_within)


def _path_within(outer: nn.Cell, inner: nn.Cell) -> str:
    """Return the path of a cell in another cell, or "(Type)" if it is not in that cell."""
    for name, cell in outer.cells_and_names():
        if cell is inner:
            return str(name)
    return type_as_path(inner)


REASON = "its ops are in a compiled graph; MS_JIT=0 in the environment runs it op by op"


def report_compiled(patches: Patches) -> None:
    """Patch calls of compiled functions, and of cells in graph mode, to be reported to the open scopes.

    Such calls run without tools.
    """

    def describe_function(executor: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
        return f"inside of the compiled {executor.fn.__qualname__}", REASON

    def describe_cell(cell: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
        return f"inside of the compiled {type(cell).__qualname__}", REASON

    patches.set(api._JitExecutor, "__call__", hide_ops(api._JitExecutor.__call__, describe_function))
    patches.set(nn.Cell, "compile_and_run", hide_ops(nn.Cell.compile_and_run, describe_cell))


recompute: Any = import_module("mindspore.common.recompute")  # as an attribute the function is in its place


def patch_recomputation(patches: Patches) -> None:
    """Patch both forms of recomputation, so that recomputed ops have the ids of the first run."""
    patches.set(recompute, "recompute_without_reentrant", _stand_in_for_recompute())
    patches.set(recompute._RecomputeCell, "construct", _stand_in_for_construct())
    patches.set(recompute._RecomputeCell, "bprop", _stand_in_for_bprop())


def _stand_in_for_recompute() -> Callable[..., Any]:
    """Stand-in for `recompute_without_reentrant`: the second run of the block has the op ids of the first."""
    original = recompute.recompute_without_reentrant

    @wraps(original)
    def recompute_without_reentrant(block: Any, *args: Any, **kwargs: Any) -> Any:
        return original(recomputable(block), *args, **kwargs)

    return recompute_without_reentrant


_PLACES = "_amanda_places"
"""Attribute of a recomputed cell: for each call without a backward pass, what calls at its place."""


def _stand_in_for_construct() -> Callable[..., Any]:
    """Stand-in for `_RecomputeCell.construct`, the first run: remembers the place of the call for `bprop`."""
    original = recompute._RecomputeCell.construct

    @wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        call_at_this_place = bind_to_current_place(_call_function)
        self.__dict__.setdefault(_PLACES, []).append(call_at_this_place)
        return call_at_this_place(original, self, *args, **kwargs)

    return construct


def _stand_in_for_bprop() -> Callable[..., Any]:
    """Stand-in for `_RecomputeCell.bprop`: recomputes at the place of the last call of `construct`."""
    original = recompute._RecomputeCell.bprop

    @wraps(original)
    def bprop(self: Any, *args: Any) -> Any:
        """Recompute at the place of the last call without a backward pass; here if none was recorded."""
        places = self.__dict__.get(_PLACES)
        # Backward passes come in reverse order of the calls.
        call_at_its_place = places.pop() if places else _call_function
        return call_at_its_place(original, self, *args)

    return bprop


def _call_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
