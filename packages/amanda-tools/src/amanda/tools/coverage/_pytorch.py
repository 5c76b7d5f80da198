"""Calls of PyTorch's modules."""

from __future__ import annotations

from functools import cache
from types import CodeType
from typing import Any

from amanda.tools.coverage._calls import Modules
from amanda.tools.kit._requirements import check


@cache
def _codes() -> frozenset[CodeType]:
    from torch.nn import Module

    check("coverage", "torch")
    return frozenset({Module._call_impl.__code__})


def _is_leaf(module: Any) -> bool:
    return next(module.children(), None) is None


MODULES = Modules(_codes, _is_leaf)
