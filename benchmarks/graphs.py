"""TensorFlow's graphs: sessions and functions under tools, the time of a rewrite, and the worth of the cache.

Processor time of the whole process on one core: TensorFlow computes on threads of its own.
"""

import functools
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
from _measure import BARE, QUICK, controls, interleaved, pin_to_one_core, progress, seconds_of, steps_in_turns
from _tools import FORWARD, Inserting, Make, cache_on_and_off, scopes

import amanda
from amanda.tools.dump import DumpTool
from amanda.tools.effective_path import EffectivePathTool
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool

TRAINING = "forward + backward"
PASSES = {"forward": False, TRAINING: True}
HEAVY = ("Conv2D", "MatMul", "BatchMatMulV2", "Einsum")
seconds = functools.partial(seconds_of, clock=time.process_time)
in_turns = functools.partial(steps_in_turns, clock=time.process_time)


class OneNative(amanda.Tool):
    """One native routine at the first op that takes a floating value: an instrumented copy runs."""

    def __init__(self) -> None:
        self.placed = False
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: amanda.OpContext) -> None:
        outputs = context.get_outputs()
        if not self.placed and outputs and outputs[0].dtype.is_floating and context.get_inputs():
            self.placed = True
            context.insert_after_op(unchanged, outputs=[0])


@amanda.traceable
def unchanged(value: Any) -> Any:
    """Return the value, as it is."""
    return value


@amanda.observer
def observe(*values: Any) -> None:
    """Look at nothing."""


class Pruning(amanda.Tool):
    """Masks weights of convolutions and products, and the gradients of convolutions' weights."""

    def __init__(self, sparsity: float = 0.5) -> None:
        self.sparsity = sparsity
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type in HEAVY and (mask := self.mask_of(context)) is not None:
            context["mask"] = mask
            context.insert_before_op(multiply, inputs=[1], mask=mask)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        if "mask" in context and context.get_backward_op().type == "Conv2DBackpropFilter":
            context.insert_after_backward_op(multiply, grad_inputs=[0], mask=context["mask"])

    def mask_of(self, context: amanda.OpContext) -> Any:
        """Return a mask by magnitude; None where the second input is no weight."""
        try:
            weight = np.abs(np.asarray(context.get_value(1)))
        except (amanda.AmandaError, NotImplementedError):  # a symbol that has no value yet
            return None
        dropped = int(self.sparsity * weight.size)
        return (weight > np.partition(weight, dropped, axis=None)[dropped]).astype(weight.dtype)


@amanda.traceable
def multiply(value: Any, mask: Any) -> Any:
    """Return the elementwise product."""
    return value * mask


TOOLS: Mapping[str, Make] = {
    "looks at every op": Inserting,
    "one native routine": OneNative,
    "observer on convolutions and products": lambda: Inserting(
        "after", routine=observe, where=lambda context: context.get_op().type in HEAVY
    ),
    "observer on every op": lambda: Inserting("after", routine=observe),
}
TASKS: Mapping[str, Make] = {
    "tracing": TraceTool,
    "FLOPs": FlopsTool,
    "effective path": EffectivePathTool,
    "pruning": Pruning,
    "quantization": lambda: QuantizeTool("dynamic"),
}
"""Those of the paper."""
HITS = {name: TOOLS[name] for name in ("looks at every op", "one native routine")}


def passes() -> dict[str, bool]:
    """Return True for each pass that trains; a quick run's steps all do."""
    return {title: training for title, training in PASSES.items() if training or not QUICK}


def hits() -> dict[str, Any]:
    """Return microseconds of a call of a small graph: mode -> variant -> one value a round."""
    from _graph_models import CHAINS

    found, repeats = {}, 3 if QUICK else 200
    for mode, make in CHAINS.items():
        step = make(10)

        def measure(_: str, step: Callable[[], object] = step) -> float:
            return 1e6 / repeats * seconds(lambda: [step() for _ in range(repeats)])

        found[mode] = interleaved(controls() | scopes(HITS), measure, 3, most=40)
    return found


def steps() -> dict[str, Any]:
    """Return seconds of a step of the first model: model, mode -> pass -> variant -> one value a round."""
    from _graph_models import MODES, models

    found: dict[str, Any] = {}
    name, model = next(iter(models().items()))
    for mode, make in MODES.items():
        here = found[f"{name}, {mode}"] = {"example": model.words, "passes": {}}
        for title, training in passes().items():
            progress(f"  {name}, {mode}, {title}")
            step = make(model, training)
            here["passes"][title] = in_turns(step, controls() | scopes(TOOLS), 4, 5)
            gc.collect()
    return found


def first_call(step: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds that a new tool's first call takes more than its second, its ops and actions.

    bare: the same of the program itself, which was not called before: TensorFlow's own work.
    Raises RuntimeError if the tool sees no op.
    """
    bare = seconds(step) - seconds(step)
    tool = Inserting(*FORWARD, "after backward")
    with amanda.apply(tool) as scope:
        more = seconds(step) - seconds(step)
    if not tool.actions:
        raise RuntimeError(f"nothing is instrumented: {scope.report}")
    return {"bare": bare, "seconds": more, "ops": tool.ops, "actions": tool.actions}


def rewrites() -> dict[str, Any]:
    """Return those of a train step of the first model, and of chains: mode -> program -> list of rewrites."""
    from _graph_models import CHAINS, MODES, models

    name, model = next(iter(models().items()))
    found: dict[str, Any] = {}
    for mode, make in MODES.items():
        progress(f"  rewrites, {mode}")
        programs = {f"{name}, {TRAINING}": functools.partial(make, model, True)}
        for length in (100,) if QUICK else (500, 4000):
            programs[f"{length:,} ops"] = functools.partial(CHAINS[mode], length)
        found[mode] = {}
        for what, program in programs.items():
            found[mode][what] = [first_call(program())]
            gc.collect()  # TensorFlow knows an equal copy again, as long as one lives
    return found


def whole_tools() -> dict[str, Any]:
    """Return seconds of a training step of MobileNetV2 under tools, and under observers of no effect."""
    from _graph_models import in_a_function, mobilenet

    model = mobilenet()
    progress(f"  MobileNetV2, {model.words}")
    step = in_a_function(model, training=True)

    def measure(_: str) -> float:
        step()  # between the opening of a scope and the timing: it goes on in the scope
        return seconds(step)

    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as folder:
        tools: dict[str, Make] = {
            "observer on every op": TOOLS["observer on every op"],
            "nan": NanTool,
            "stats": StatsTool,
            "dump, every execution": lambda: DumpTool(Path(folder, "dump"), executions=None),
        }
        taken = interleaved(controls() | scopes(tools), measure, 12, 7)
    return {f"MobileNetV2, {model.words}": taken}


def cache(which: Iterable[tuple[str, Any, str]]) -> dict[str, Any]:
    """Return seconds of a training step under each task's tool: task, model, mode -> pass -> variant.

    which: names, models and modes.
    """
    from _graph_models import MODES

    found: dict[str, Any] = {}
    for name, model, mode in which:
        step = MODES[mode](model, True)
        for task, tool in TASKS.items():
            progress(f"  cache, {task}, {name}, {mode}")
            under = {BARE: nullcontext, **cache_on_and_off(tool())}
            found[f"{task}: {name}, {mode}"] = {TRAINING: in_turns(step, under, 2, 3, 20)}
        gc.collect()
    return found


def benchmark() -> dict[str, Any]:
    """Return everything about graphs; "short cache" is of steps as short as an accelerator's."""
    pin_to_one_core()
    from _graph_models import models, short_models

    (name, model), *_ = models().items()
    (image, residual), (words, bert) = short_models().items()
    short = [(words, bert, "session"), (words, bert, "function"), (image, residual, "function")]
    return {
        "hits": hits(), "steps": steps(), "tools": whole_tools(), "rewrites": rewrites(),
        "cache": cache([] if QUICK else [(name, model, "function")]),
        "short cache": cache(short[: 1 if QUICK else None]),
    }  # fmt: skip
