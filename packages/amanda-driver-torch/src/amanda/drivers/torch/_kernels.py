"""Kernels of torch that are written in Python, as most are that compute shapes on the device meta."""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from amanda.plan import spread

_MODULES = (
    "torch._meta_registrations", "torch._refs", "torch._decomp", "torch._prims", "torch._prims_common",
)  # fmt: skip


def is_part_of_kernel(frame: FrameType | None, values: Iterable[Any]) -> bool:
    """Return True for a call by a kernel in Python, which is a part of the op that runs the kernel.

    frame: where the call is.  values: its arguments; a program may call the functions of such modules
    itself, on tensors with data, and these calls are ops.
    """
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_MODULES):
            devices = {one.device.type for one in spread(list(values)) if isinstance(one, torch.Tensor)}
            return not devices or "meta" in devices
        if not name.startswith(("torch.", "contextlib")):
            return False
        frame = frame.f_back
    return False
