"""Ops that make a model: those that constructors and initializers of PyTorch and Keras compute."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Literal

_CONSTRUCTORS = frozenset(
    {"__init__", "build", "build_from_config", "initialize_parameters", "reset_parameters",
     "_reset_parameters", "reset_running_stats", "init_weights", "_init_weights"}
)  # fmt: skip
_CALLS = frozenset(
    {("_call_impl", "torch.nn.modules.module"),
     ("__call__", "keras.src.layers.layer"), ("__call__", "tf_keras.src.engine.base_layer")}
)  # fmt: skip
_LAYERS = frozenset(
    {("torch.nn.modules.module", "Module"), ("keras.src.layers.layer", "Layer"),
     ("tf_keras.src.engine.base_layer", "Layer")}
)  # fmt: skip
_INITIALIZERS = ("torch.nn.init", "keras.src.initializers", "tf_keras.src.initializers")


def part_of(frame: FrameType) -> Literal["construction", "call"] | None:
    """Return what a frame says of the ops below it: they make a model, or the call of a layer runs them."""
    function = frame.f_code.co_name
    if function in _CONSTRUCTORS and _is_of_layer(frame):
        return "construction"
    module = frame.f_globals.get("__name__")
    if (function, module) in _CALLS:
        return "call"
    return "construction" if isinstance(module, str) and module.startswith(_INITIALIZERS) else None


def in_construction() -> bool:
    """Return True if the innermost frame that says so makes a model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        part = part_of(frame)
        if part is not None:
            return part == "construction"
        frame = frame.f_back
    return False


def _is_of_layer(frame: FrameType) -> bool:
    """Return True for a method of a module of PyTorch, or of a layer of Keras."""
    code = frame.f_code
    if not code.co_argcount:
        return False
    kind = type(frame.f_locals.get(code.co_varnames[0]))
    return any((base.__module__, base.__qualname__) in _LAYERS for base in kind.__mro__)
