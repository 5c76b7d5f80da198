"""Calls of leaf modules: which ops they are made of, and which of those a hook at the module sees."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

import amanda
from amanda.tools.coverage._result import OpCoverage
from amanda.tools.kit import RequiredNames

_KERAS = RequiredNames("amanda.tools.coverage", "keras", "keras.src.layers.layer:Layer._flatten_layers")

_REQUIRED = RequiredNames("amanda.tools.coverage", "torch", "torch:nn.Module._call_impl")


class Span:
    """The ops of one call, in one phase, as they come: a hook sees into the first and out of the last."""

    __slots__ = ("_count", "_first", "_last")

    def __init__(self) -> None:
        self._count = 0
        self._first: OpCoverage
        self._last: OpCoverage

    def add(self, place: OpCoverage) -> None:
        """Add one more op, which is the last so far."""
        if self._count == 0:
            self._first = place
            place.entered += 1
            place.whole += 1
        else:
            if self._count == 1:
                self._first.whole -= 1
            self._last.left -= 1
        place.left += 1
        self._last = place
        self._count += 1


class Call:
    """One call of a module; number: of the times the tool was cleared before."""

    __slots__ = ("backward", "forward", "leaf", "number")

    def __init__(self, leaf: bool, number: int) -> None:
        self.leaf = leaf
        self.number = number
        self.forward, self.backward = Span(), Span()


class Modules:
    """Finds the calls of modules on the stack.

    codes: of the methods that hooks are called in.  is_leaf: whether a module has none within.
    """

    def __init__(self, codes: Callable[[], frozenset[CodeType]], is_leaf: Callable[[Any], bool]) -> None:
        self._codes = codes
        self._is_leaf = is_leaf

    def describe(self, context: amanda.OpContext) -> None:
        """Write `modules`, which finds the call that an op belongs to."""
        context["modules"] = self

    def innermost(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame of the call that an op belongs to."""
        codes = self._codes()
        while frame is not None and frame.f_code not in codes:
            frame = frame.f_back
        return frame

    def outermost_class(self, frame: FrameType | None) -> str:
        """Return the class of the module that is called first; "" outside of modules."""
        codes, name = self._codes(), ""
        while frame is not None:
            if frame.f_code in codes:
                name = type(frame.f_locals["self"]).__name__
            frame = frame.f_back
        return name

    def call(self, frame: FrameType, number: int) -> Call:
        """Return the call that a frame is of."""
        return Call(self._is_leaf(frame.f_locals["self"]), number)


@cache
def _codes_of_torch() -> frozenset[CodeType]:
    from torch.nn import Module

    _REQUIRED.check()
    return frozenset({Module._call_impl.__code__})


_LAYERS = (("keras.src.layers.layer", "Layer"), ("tf_keras.src.engine.base_layer", "Layer"))
_found: dict[str, CodeType] = {}


def _codes_of_keras() -> frozenset[CodeType]:
    for module, name in _LAYERS:
        if module not in _found and (layer := getattr(sys.modules.get(module), name, None)) is not None:
            if module.startswith("keras."):
                _KERAS.check()
            _found[module] = inspect.unwrap(vars(layer)["__call__"]).__code__
    return frozenset(_found.values())


def _has_no_modules(module: Any) -> bool:
    return next(module.children(), None) is None


def _has_no_layers(layer: Any) -> bool:
    return next(iter(layer._flatten_layers(include_self=False)), None) is None


TORCH = Modules(_codes_of_torch, _has_no_modules)
KERAS = Modules(_codes_of_keras, _has_no_layers)
"""Calls of layers in eager mode: a graph has none."""
