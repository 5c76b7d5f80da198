"""Compiled callables in scopes: whether their graphs are instrumented, and a report if they run op by op."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeGuard

import torch
from amanda.backend import State

from ._requirements import torch_attribute

GRAPHS_UNSUPPORTED = (
    "it lacks what graphs are instrumented with, so that compiled callables run op by op in scopes"
)
RAN_OP_BY_OP = (
    "ran op by op, as eager code: what the compiler made of it did not run; "
    'compiled="instrument" puts tools into the compiled code'
)
"""Reason of a report on a compiled callable that ran its Python code."""


def asks_for_graphs(state: object) -> TypeGuard[State]:
    """Return True if compiled callables are to be instrumented in this state."""
    if type(state) is not State or state.stack is None or not state.scopes:
        return False
    return state.scopes[-1].compiled == "instrument"  # the innermost scope decides


def supports_stances() -> bool:
    """Return True if dynamo, once imported, has stances, which decide if compiled code runs (torch 2.6)."""
    # Importing dynamo takes seconds, and a program without torch.compile does not need it.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return hasattr(frames, "_callback_from_stance") and torch_attribute("compiler.set_stance") is not None


def report_op_by_op(state: State, frame: FrameType | None) -> None:
    """Report the compiled callable that a frame of dynamo's is about to run as eager code."""
    state.report(*entry_of_op_by_op_run(None if frame is None else frame.f_locals.get("fn")))


def entry_of_op_by_op_run(function: Callable[..., Any] | None) -> tuple[str, str, str]:
    """Return the report entry of a compiled callable: its name, the reason, "file:line" of its code."""
    # dynamo and decorators wrap the user's function, whose name and line the report is to show.
    function = None if function is None else inspect.unwrap(function)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        model_class = type(owner)
        name = f"compiled model {model_class.__qualname__}.forward"
        code = getattr(model_class.forward, "__code__", None)
    else:
        function_name = getattr(function, "__qualname__", None)
        name = f"compiled function {function_name}" if function_name else "compiled code"
        code = getattr(function, "__code__", None)
    location = f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""
    return name, RAN_OP_BY_OP, location
