"""Recomputation in the backward pass, whose ops have the ids of the first computation."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from amanda.backend import Attributes, recomputed, replayed

recompute: Any = import_module("mindspore.common.recompute")  # as an attribute the function is in its place


def patch_recomputation(attributes: Attributes) -> None:
    """Patch both forms of recomputation, so that recomputed ops have the ids of the first run."""
    attributes.set(recompute, "recompute_without_reentrant", _stand_in_for_recompute())
    attributes.set(recompute._RecomputeCell, "construct", _stand_in_for_construct())
    attributes.set(recompute._RecomputeCell, "bprop", _stand_in_for_bprop())


def _stand_in_for_recompute() -> Callable[..., Any]:
    """Stand-in for `recompute_without_reentrant`: replays the ids of the block."""
    original = recompute.recompute_without_reentrant

    @wraps(original)
    def recompute_without_reentrant(block: Any, *args: Any, **kwargs: Any) -> Any:
        return original(recomputed(block), *args, **kwargs)

    return recompute_without_reentrant


_PLACES = "_amanda_places"


def _stand_in_for_construct() -> Callable[..., Any]:
    """Stand-in for `_RecomputeCell.construct`: remembers the place of the call."""
    original = recompute._RecomputeCell.construct

    @wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        at_this_place = replayed(_call)
        self.__dict__.setdefault(_PLACES, []).append(at_this_place)
        return at_this_place(original, self, *args, **kwargs)

    return construct


def _stand_in_for_bprop() -> Callable[..., Any]:
    """Stand-in for `_RecomputeCell.bprop`: recomputes at the place of the last call of `construct`."""
    original = recompute._RecomputeCell.bprop

    @wraps(original)
    def bprop(self: Any, *args: Any) -> Any:
        places = self.__dict__.get(_PLACES)
        at_that_place = places.pop() if places else _call
        return at_that_place(original, self, *args)

    return bprop


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
