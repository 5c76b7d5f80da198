"""Frames that dynamo leaves to Python: Amanda at ops that run on their own, and the routines of tools."""

from __future__ import annotations

from typing import Any

from amanda import interceptor
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo.types import ConvertFrameReturn

_PLAINLY = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
"""Without dynamo, and so is all that is called in turn."""

ONCE = ConvertFrameReturn(_PLAINLY, apply_to_code=False)
"""The word to dynamo for a frame that this call alone runs without it."""


def left_to_python(frame: Any) -> ConvertFrameReturn | None:
    """Return what dynamo is told of a frame that it shall not convert; None for others.

    It is told for good of Amanda's own code, and of others once: a routine may be called elsewhere too.
    """
    if interceptor.codes.is_ours(frame.f_code):
        return ConvertFrameReturn(_PLAINLY)
    return ONCE if interceptor.active() is None else None


class Sparing:
    """Stands in for a callback of dynamo's that converts frames of the user alone."""

    def __init__(self, callback: Any) -> None:
        self._torchdynamo_orig_backend = callback

    def __call__(self, frame: Any, *args: Any) -> Any:
        return left_to_python(frame) or self._torchdynamo_orig_backend(frame, *args)
