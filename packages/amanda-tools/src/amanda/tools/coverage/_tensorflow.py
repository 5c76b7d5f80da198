"""Calls of Keras' layers, in eager mode: a graph has none."""

from __future__ import annotations

import inspect
import sys
from types import CodeType
from typing import Any

from amanda.tools.coverage._calls import Modules

_LAYERS = (("keras.src.layers.layer", "Layer"), ("tf_keras.src.engine.base_layer", "Layer"))
_found: dict[str, CodeType] = {}


def _codes() -> frozenset[CodeType]:
    for module, name in _LAYERS:
        if module not in _found and (layer := getattr(sys.modules.get(module), name, None)) is not None:
            _found[module] = inspect.unwrap(vars(layer)["__call__"]).__code__
    return frozenset(_found.values())


def _is_leaf(layer: Any) -> bool:
    return next(iter(layer._flatten_layers(include_self=False)), None) is None


MODULES = Modules(_codes, _is_leaf)
