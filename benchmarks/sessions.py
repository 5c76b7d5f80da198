"""Sessions of ONNX Runtime under tools: what a run takes more, and what a copy of the model takes to make.

Processor time of the whole process on one core, with one thread.
"""

import os
import time
from typing import Any

import numpy as np
import onnxruntime
from _measure import controls, interleaved, progress, script
from _onnx_models import Residual

import amanda
from amanda.drivers.onnxruntime import session_options


class Looking(amanda.Tool):
    """Looks at every op and inserts nothing: the user's own session runs."""

    def __init__(self) -> None:
        self.ops = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.ops += 1


class Observers(amanda.Tool):
    """An observer of the outputs of every op, or of convolutions alone."""

    def __init__(self, convolutions: bool = False) -> None:
        self.convolutions = convolutions
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if not self.convolutions or context.get_op().type == "Conv":
            context.insert_after_op(observe)


class AfterConvolutions(amanda.Tool):
    """A routine after each convolution, which may change what that gives, and does not: sessions are cut."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Conv":
            context.insert_after_op(same)


class Pruning(amanda.Tool):
    """Masks the weights of convolutions by a traceable routine, which is written into the copy."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Conv":
            context.insert_before_op(larger_half, inputs=[1])


@amanda.observer
def observe(*values: Any) -> None:
    """Looks at nothing."""


def same(*values: Any) -> None:
    """Changes nothing."""


@amanda.traceable
def larger_half(weight: Any) -> Any:
    """The larger half of the magnitudes."""
    return np.where(abs(weight) > np.sort(abs(weight).reshape(-1))[weight.size // 2], weight, 0)


TOOLS = {
    "looks at every op": Looking,
    "observer on convolutions": lambda: Observers(convolutions=True),
    "observer on every op": Observers,
    "routine after each convolution": AfterConvolutions,
    "traceable masks of weights": Pruning,
}


def models(quick: bool) -> dict[str, Residual]:
    """The networks, by their titles."""
    if quick:
        return {"a residual network, image of 32 x 32": Residual((1, 1), 8, 32)}
    return {"ResNet-50, image of 224 x 224": Residual((3, 4, 6, 3), 64, 224)}


def seconds(session: Any, feed: dict[str, Any]) -> float:
    """Processor seconds of a run."""
    start = time.process_time()
    session.run(None, feed)
    return time.process_time() - start


def options(fused: bool) -> Any:
    """Options of a session with one thread; as ONNX Runtime has them, or without fusion."""
    made = onnxruntime.SessionOptions() if fused else session_options()
    made.intra_op_num_threads = made.inter_op_num_threads = 1
    return made


def benchmark(quick: bool) -> dict[str, Any]:
    """By model and by whether nodes are fused: seconds of runs by tool, and of the first run of each tool."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found: dict[str, Any] = {}
    for title, network in models(quick).items():
        shape = (1, 3, network.size, network.size)
        feed = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
        here: dict[str, Any] = {"nodes": len(network.nodes), "runs": {}, "first": {}}
        for fused in (True, False):
            mode = "as it is by default" if fused else "without fusion"
            progress(f"  {title}, {mode}")
            session = onnxruntime.InferenceSession(network.model(), options(fused))
            tools = {name: make() for name, make in TOOLS.items()}
            here["first"][mode] = {name: _first(session, feed, tool) for name, tool in tools.items()}
            variants = {
                **controls(),
                **{name: lambda tool=tool: amanda.apply(tool) for name, tool in tools.items()},
            }
            here["runs"][mode] = interleaved(
                variants, lambda _, session=session, feed=feed: seconds(session, feed), 0 if quick else 60,
                1 if quick else 15,
            )  # fmt: skip
        found[title] = here
    return {"models": found}


def _first(session: Any, feed: dict[str, Any], tool: amanda.Tool) -> float:
    """What a tool's first run takes more than its second."""
    with amanda.apply(tool):
        return seconds(session, feed) - seconds(session, feed)


if __name__ == "__main__":
    script(benchmark, __doc__)
