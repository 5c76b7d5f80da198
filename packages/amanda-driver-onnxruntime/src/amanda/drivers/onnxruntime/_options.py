"""Options of sessions that fuse nothing, so that a routine between two ops leaves every bit as it is."""

from typing import Any

import onnxruntime
from amanda.options import checked


@checked
def session_options(options: onnxruntime.SessionOptions | None = None) -> Any:
    """Return SessionOptions with which a session fuses, folds and moves no node.

    Weights are not packed either: a kernel for packed weights may compute other bits than a kernel that gets
    its weights at each run.  With these options, routines that change nothing leave each bit of the results.
    options: a SessionOptions to change; a new one by default.

    >>> session_options().graph_optimization_level.name
    'ORT_DISABLE_ALL'
    """
    unfused = onnxruntime.SessionOptions() if options is None else options
    unfused.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    unfused.add_session_config_entry("session.disable_prepacking", "1")
    return unfused
