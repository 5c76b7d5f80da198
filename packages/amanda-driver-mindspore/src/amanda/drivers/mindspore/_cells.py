"""Cells: regions of the program, compiled cells and functions, and recomputed cells."""

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
    """Report each compiled function that is called, and each cell in graph mode, to the open scopes."""

    def entry_of_function(executor: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
        return f"inside of the compiled {executor.fn.__qualname__}", REASON

    def entry_of_cell(cell: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
        return f"inside of the compiled {type(cell).__qualname__}", REASON

    patches.set(api._JitExecutor, "__call__", hide_ops(api._JitExecutor.__call__, entry_of_function))
    patches.set(nn.Cell, "compile_and_run", hide_ops(nn.Cell.compile_and_run, entry_of_cell))


recompute: Any = import_module("mindspore.common.recompute")  # as an attribute the function is in its place


def patch_recomputation(patches: Patches) -> None:
    """Patch both forms of recomputation, so that recomputed ops have the ids of the first run."""
    patches.set(recompute, "recompute_without_reentrant", _stand_in_for_recompute())
    patches.set(recompute._RecomputeCell, "construct", _stand_in_for_construct())
    patches.set(recompute._RecomputeCell, "bprop", _stand_in_for_bprop())


def _stand_in_for_recompute() -> Callable[..., Any]:
    """Stand-in for `recompute_without_reentrant`: replays the ids of the block."""
    original = recompute.recompute_without_reentrant

    @wraps(original)
    def recompute_without_reentrant(block: Any, *args: Any, **kwargs: Any) -> Any:
        return original(recomputable(block), *args, **kwargs)

    return recompute_without_reentrant


_PLACES = "_amanda_places"


def _stand_in_for_construct() -> Callable[..., Any]:
    """Stand-in for `_RecomputeCell.construct`: remembers the place of the call."""
    original = recompute._RecomputeCell.construct

    @wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        at_this_place = bind_to_current_place(_call)
        self.__dict__.setdefault(_PLACES, []).append(at_this_place)
        return at_this_place(original, self, *args, **kwargs)

    return construct


def _stand_in_for_bprop() -> Callable[..., Any]:
    """Stand-in for `_RecomputeCell.bprop`: recomputes at the place of the last call of `construct`."""
    original = recompute._RecomputeCell.bprop

    @wraps(original)
    def bprop(self: Any, *args: Any) -> Any:
        """Recompute at the place of the last call without a backward pass; here if none was recorded."""
        places = self.__dict__.get(_PLACES)
        # Backward passes come in reverse order of the calls.
        at_that_place = places.pop() if places else _call
        return at_that_place(original, self, *args)

    return bprop


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
