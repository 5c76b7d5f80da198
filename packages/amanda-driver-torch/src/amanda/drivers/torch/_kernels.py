"""Calls of the parts of torch that are written in Python, which are part of the op that torch runs."""

from __future__ import annotations

from types import FrameType

import torch
from amanda.interceptor import running
from torch._functorch.autograd_function import custom_function_call

from ._requirements import torch_attribute

FUNCTION_CALL = custom_function_call
"""The operator by which torch.func brings a program's autograd.Function to each transform."""
_KERNELS = (
    "torch._meta_registrations", "torch._refs", "torch._decomp", "torch._prims", "torch._prims_common",
    "torch.nested._internal",
)  # fmt: skip
"""Modules with kernels: for the device meta, for tensors without data, and for jagged tensors."""

_NO_TASK = -1
"""Number of autograd's task on a thread without a backward pass."""
_graph_task = torch_attribute("_C._current_graph_task_id") or (lambda: _NO_TASK)


def is_called_by_kernel(frame: FrameType | None) -> bool:
    """Return True for a call that a kernel in Python makes, in the forward or the backward pass.

    frame: of the call.  If a program calls a function of these modules directly, its calls are ops.
    """
    # Outside of an op and of a backward pass every call is the program's: no frame need be looked at.
    if running() is None and _graph_task() == _NO_TASK:
        return False
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_KERNELS):
            return True
        if not name.startswith(("torch.", "contextlib", "amanda.")):
            return False  # the program's code: it calls torch, not a kernel
        frame = frame.f_back
    return False


def is_dispatched_in_backward(frame: FrameType | None) -> bool:
    """Return True for an operator that a dispatch mode, or a subclass, calls on in the backward pass.

    In the forward pass the interceptor knows the op that the operator belongs to; a node of autograd is no
    call that it could know.
    """
    if _graph_task() == _NO_TASK:
        return False
    while frame is not None and frame.f_code is not _BACKWARD:
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
"""Code that calls the backward of a program's Function, whose calls are ops."""


def is_call_for_next_transform(frame: FrameType) -> bool:
    """Return True for a call by which torch.func brings an autograd.Function to the next transform.

    frame: of the call.  The program's own call, at the level of all transforms in force, is the op.
    """
    caller: FrameType | None = frame
    while caller is not None and str(caller.f_globals.get("__name__")).startswith("amanda.interceptor"):
        caller = caller.f_back  # of a detour, without the native interceptor
    if caller is None:
        return False
    if caller.f_globals.get("__name__") == type(FUNCTION_CALL).__module__:
        return True
    if caller.f_code is _CALL_FROM_APPLY:
        return True  # the native `apply`, which makes this call, is the op
    return caller.f_back is not None and caller.f_back.f_code is _FUNCTION_CALL_CODE


_FUNCTION_CALL_CODE = type(FUNCTION_CALL).__call__.__code__
_CALL_FROM_APPLY = getattr(torch_attribute("autograd.function._call_custom_function_call"), "__code__", None)
"""Code by which the native `apply` brings a Function to transforms; None before torch 2.14."""
