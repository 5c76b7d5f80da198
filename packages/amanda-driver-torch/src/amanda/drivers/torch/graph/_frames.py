"""Frames that dynamo must skip: Amanda's own code, and the routines of tools."""

from __future__ import annotations

from typing import Any

from amanda import interceptor
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo.types import ConvertFrameReturn

_SKIP = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
"""Run the frame, and all that it calls, without dynamo."""

SKIP_ONCE = ConvertFrameReturn(_SKIP, apply_to_code=False)
"""Dynamo's result for a frame that runs without dynamo in this call alone."""


def skip_result(frame: Any) -> ConvertFrameReturn | None:
    """Return dynamo's result for a frame that it must not convert; None for other frames.

    Amanda's own code is skipped for good. Other code is skipped once: a routine may be called elsewhere too.
    """
    # Frames of Amanda and of routines call the interceptor, which dynamo would trace into the user's graph.
    if interceptor.codes.is_ours(frame.f_code):
        return ConvertFrameReturn(_SKIP)
    return SKIP_ONCE if interceptor.active() is None else None


class CallbackForUserFrames:
    """Stand-in for dynamo's callback that converts frames of the user alone."""

    def __init__(self, callback: Any) -> None:
        self._torchdynamo_orig_backend = callback

    def __call__(self, frame: Any, *args: Any) -> Any:
        return skip_result(frame) or self._torchdynamo_orig_backend(frame, *args)
