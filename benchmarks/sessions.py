"""Sessions of ONNX Runtime under tools: the added time of a run, and the time to make a copy of the model.

Processor time of the whole process on one core, with one thread.
"""

import functools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from _measure import QUICK, controls, pin_to_one_core, progress, seconds_of, steps_in_turns
from _onnx_models import Residual
from _tools import Inserting, Make, scopes

import amanda
from amanda.drivers.onnxruntime import session_options


@amanda.observer
def observe(*values: Any) -> None:
    """Look at nothing."""


@amanda.traceable
def larger_half(weight: Any) -> Any:
    """Return the larger half of the magnitudes."""
    return np.where(abs(weight) > np.sort(abs(weight).reshape(-1))[weight.size // 2], weight, 0)


def is_convolution(context: amanda.OpContext) -> bool:
    """Return True for a convolution."""
    return bool(context.get_op().type == "Conv")


TOOLS: Mapping[str, Make] = {
    "looks at every op": Inserting,
    "observer on convolutions": lambda: Inserting("after", routine=observe, where=is_convolution),
    "observer on every op": lambda: Inserting("after", routine=observe),
    "routine after each convolution": lambda: Inserting("after", where=is_convolution),
    "traceable masks of weights": lambda: Inserting(
        "before", routine=larger_half, select=[1], where=is_convolution
    ),
}  # fmt: skip


def models() -> dict[str, Residual]:
    """Return the networks by their titles."""
    if QUICK:
        return {"a residual network, image of 32 x 32": Residual((1, 1), 8, 32)}
    return {"ResNet-50, image of 224 x 224": Residual((3, 4, 6, 3), 64, 224)}


def options(fused: bool) -> Any:
    """Return options of a session with one thread; as ONNX Runtime has them, or without fusion."""
    made = onnxruntime.SessionOptions() if fused else session_options()
    made.intra_op_num_threads = made.inter_op_num_threads = 1
    return made


def benchmark() -> dict[str, Any]:
    """Return, by model and by mode of fusion, seconds of runs by tool, and of the first run of each tool."""
    pin_to_one_core()
    found: dict[str, Any] = {}
    for title, network in models().items():
        shape = (1, 3, network.size, network.size)
        feed = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
        here = found[title] = {"nodes": len(network.nodes), "runs": {}, "first": {}}
        for fused, mode in ((True, "as it is by default"), (False, "without fusion")):
            progress(f"  {title}, {mode}")
            session = onnxruntime.InferenceSession(network.model(), options(fused))
            run = functools.partial(session.run, None, feed)
            under = scopes(TOOLS)
            first = here["first"][mode] = {}
            for name, scope in under.items():
                with scope():
                    first[name] = seconds_of(run, time.process_time) - seconds_of(run, time.process_time)
            here["runs"][mode] = steps_in_turns(run, controls() | under, 12, 7, 40, clock=time.process_time)
    return {"models": found}
