"""Ops that are executed as they are called: one call, its plan, and its backward ops.

In: a `Call` that the interceptor has caught, with the `State` of its thread.  Out: the op's result, with what
routines made of it; a native `Program` for calls alike; a `Trace` that leads from backward ops to their op.
Called by the interceptor; drivers of eager frameworks subclass `EagerDriver`.

Beside `amanda.backend` a driver may import what is in `__all__`, for frameworks whose tensors share memory.
"""

from amanda.eager.call import SavedTensors
from amanda.eager.views import Tie, Views

__all__ = ["SavedTensors", "Tie", "Views"]
