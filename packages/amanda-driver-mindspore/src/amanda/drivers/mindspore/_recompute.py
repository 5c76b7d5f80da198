"""Recomputation: what runs again in the backward pass runs at the place where it ran first."""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from amanda.backend import Attributes, recomputed, replayed

recompute: Any = import_module("mindspore.common.recompute")  # as an attribute the function is in its place


def follow_recomputation(attributes: Attributes) -> None:
    """Make both ways of recomputing bring the ops of a second run under the ids of the first."""
    attributes.set(recompute, "recompute_without_reentrant", _recomputed_block())
    attributes.set(recompute._RecomputeCell, "construct", _kept_construct())
    attributes.set(recompute._RecomputeCell, "bprop", _replayed_bprop())


def _recomputed_block() -> Callable[..., Any]:
    original = recompute.recompute_without_reentrant

    @wraps(original)
    def recompute_without_reentrant(block: Any, *args: Any, **kwargs: Any) -> Any:
        return original(recomputed(block), *args, **kwargs)

    return recompute_without_reentrant


_PLACES = "_amanda_places"


def _kept_construct() -> Callable[..., Any]:
    original = recompute._RecomputeCell.construct

    @wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
        at_this_place = replayed(_call)
        self.__dict__.setdefault(_PLACES, []).append(at_this_place)
        return at_this_place(original, self, *args, **kwargs)

    return construct


def _replayed_bprop() -> Callable[..., Any]:
    original = recompute._RecomputeCell.bprop

    @wraps(original)
    def bprop(self: Any, *args: Any) -> Any:
        places = self.__dict__.get(_PLACES)
        at_that_place = places.pop() if places else _call
        return at_that_place(original, self, *args)

    return bprop


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
