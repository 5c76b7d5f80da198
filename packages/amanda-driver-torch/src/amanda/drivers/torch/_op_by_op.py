"""Compiled callables that run op by op in a scope: the scope's report names each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from amanda.backend import State

RAN_OP_BY_OP = (
    "ran op by op, as eager code: what the compiler made of it did not run; "
    'compiled="instrument" puts tools into the compiled code'
)
"""Reason of a report on a compiled callable that ran its Python code."""


def tell(state: State, frame: FrameType | None) -> None:
    """Report the compiled callable that a frame of dynamo's is about to run as eager code."""
    state.report(*described(None if frame is None else frame.f_locals.get("fn")))


def described(function: Callable[..., Any] | None) -> tuple[str, str, str]:
    """Entry of a report on a compiled callable: its name, the reason, "file:line" of its code."""
    function = None if function is None else inspect.unwrap(function)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        kind = type(owner)
        name, code = f"compiled model {kind.__qualname__}.forward", getattr(kind.forward, "__code__", None)
    else:
        found = getattr(function, "__qualname__", None)
        name = f"compiled function {found}" if found else "compiled code"
        code = getattr(function, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""
    return name, RAN_OP_BY_OP, where
