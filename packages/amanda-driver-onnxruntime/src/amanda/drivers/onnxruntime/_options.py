"""Options of sessions that fuse nothing, so that a routine between two ops leaves every bit as it is."""

from typing import Any

import onnxruntime
from amanda.options import checked


@checked
def session_options(options: onnxruntime.SessionOptions | None = None) -> Any:
    """SessionOptions of a session that runs its nodes as they are written, none fused, folded or moved.

    Nor are weights packed for kernels of their own, which would compute otherwise than those that weights are
    handed to as they run.  Where routines change nothing, what such a session gives is the same to the bit in
    a scope as outside.  options: a SessionOptions to write that into, else a new one.

    >>> session_options().graph_optimization_level.name
    'ORT_DISABLE_ALL'
    """
    made = onnxruntime.SessionOptions() if options is None else options
    made.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    made.add_session_config_entry("session.disable_prepacking", "1")
    return made
