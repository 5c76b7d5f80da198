"""TensorFlow's graphs: sessions and functions under tools, what a rewrite takes, and what the cache is worth.

Processor time of the whole process on one core: TensorFlow computes on threads of its own.
"""

import gc
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from itertools import product
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from _measure import Variant, controls, interleaved, progress, script

import amanda
from amanda.tools.effective_path import EffectivePathTool
from amanda.tools.flops import FlopsTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.trace import TraceTool

PASSES = {"forward": False, "forward + backward": True}
HEAVY = ("Conv2D", "MatMul", "BatchMatMulV2", "Einsum")
ON, OFF = "cache on", "cache off"


class Looking(amanda.Tool):
    """Looks at every op and inserts nothing: the user's own graph runs."""

    def __init__(self) -> None:
        self.ops = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.ops += 1


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
    """The value, as it is."""
    return value


class Observers(amanda.Tool):
    """An observer of the outputs of every op, or of convolutions and products alone."""

    def __init__(self, heavy: bool = False) -> None:
        self.heavy = heavy
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if not self.heavy or context.get_op().type in HEAVY:
            context.insert_after_op(observe)


@amanda.observer
def observe(*values: Any) -> None:
    """Looks at nothing."""


class Acting(amanda.Tool):
    """Routines before and after every op, and after every backward op; they change nothing."""

    def __init__(self) -> None:
        self.ops = self.actions = 0
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        self.ops, self.actions = self.ops + 1, self.actions + 2
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        self.ops, self.actions = self.ops + 1, self.actions + 1
        context.insert_after_backward_op(self.routine)

    def routine(self, *values: Any) -> None:
        return None


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
        """By magnitude; None where the second input is no weight."""
        import numpy as np

        try:
            weight = np.abs(np.asarray(context.get_value(1)))
        except (amanda.AmandaError, NotImplementedError):  # a symbol that has no value yet
            return None
        kept = (
            weight
            > np.partition(weight, int(self.sparsity * weight.size), axis=None)[
                int(self.sparsity * weight.size)
            ]
        )
        return kept.astype(weight.dtype)


@amanda.traceable
def multiply(value: Any, mask: Any) -> Any:
    """Elementwise."""
    return value * mask


TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    "looks at every op": Looking,
    "one native routine": OneNative,
    "observer on convolutions and products": lambda: Observers(heavy=True),
    "observer on every op": Observers,
}
TASKS: dict[str, Callable[[], amanda.Tool]] = {
    "tracing": TraceTool,
    "FLOPs": FlopsTool,
    "effective path": EffectivePathTool,
    "pruning": Pruning,
    "quantization": lambda: QuantizeTool("dynamic"),
}
"""Those of the paper."""

HITS = ("looks at every op", "one native routine")


def under(tool: amanda.Tool) -> Variant:
    """A scope of a tool that stays the same."""
    return lambda: amanda.apply(tool)


@contextmanager
def without_cache(tool: amanda.Tool) -> Any:
    """A scope in which everything is analysed anew."""
    with amanda.apply(tool), amanda.cache_disabled():
        yield


def seconds(step: Callable[[], object], repeats: int = 1) -> float:
    """Processor seconds of a step."""
    start = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - start) / repeats


def passes(quick: bool) -> dict[str, bool]:
    """Whether a step trains, by its title; a quick run's steps all do."""
    return {title: training for title, training in PASSES.items() if training or not quick}


def hits(quick: bool) -> dict[str, Any]:
    """Microseconds of a call of a small graph: mode -> variant -> one value a round."""
    from _graph_models import CHAINS

    found, repeats = {}, 3 if quick else 200
    for mode, make in CHAINS.items():
        step = make(10)
        variants = {**controls(), **{name: under(TOOLS[name]()) for name in HITS}}
        found[mode] = interleaved(
            variants, lambda _, step=step: 1e6 * seconds(step, repeats), 0 if quick else 6, 1 if quick else 7
        )
    return found


def steps(quick: bool) -> dict[str, Any]:
    """Seconds of a step: model, mode -> pass -> variant -> one value a round."""
    from _graph_models import MODES, models

    found: dict[str, Any] = {}
    for name, model in models(quick).items():
        for mode, make in MODES.items():
            here = found[f"{name}, {mode}"] = {"example": model.words, "passes": {}}
            for title, training in passes(quick).items():
                progress(f"  {name}, {mode}, {title}")
                step = make(model, training)
                variants = {**controls(), **{name: under(tool()) for name, tool in TOOLS.items()}}
                here["passes"][title] = interleaved(
                    variants, lambda _, step=step: seconds(step), 0 if quick else 15, 1 if quick else 7, 40
                )
                gc.collect()
    return found


def first_call(step: Callable[[], object]) -> dict[str, Any]:
    """Seconds that a new tool's first call takes more than its second, and how much it did.

    bare: the same of the program itself, which was not called before: TensorFlow's own work.
    Raises RuntimeError if the tool sees no op.
    """
    bare = seconds(step) - seconds(step)
    tool = Acting()
    with amanda.apply(tool) as scope:
        first = seconds(step)
        later = seconds(step)
    if not tool.actions:
        raise RuntimeError(f"nothing is instrumented: {scope.report}")
    return {"bare": bare, "seconds": first - later, "ops": tool.ops, "actions": tool.actions}


def rewrites(quick: bool) -> dict[str, Any]:
    """Of a train step of the first model, and of chains: mode -> what -> list of rewrites."""
    from _graph_models import CHAINS, MODES, models

    name, model = next(iter(models(quick).items()))
    lengths = (50, 100) if quick else (500, 2000, 6000)
    found: dict[str, Any] = {}
    for mode, make in MODES.items():
        progress(f"  rewrites, {mode}")
        programs = {f"{name}, forward + backward": lambda make=make: make(model, True)}
        programs |= {f"{length:,} ops": lambda mode=mode, n=length: CHAINS[mode](n) for length in lengths}
        found[mode] = {}
        for what, program in programs.items():
            found[mode][what] = [first_call(program()) for _ in range(1 if quick else 3)]
            gc.collect()  # TensorFlow knows an equal copy again, as long as one lives
    return found


def cache(quick: bool) -> dict[str, Any]:
    """Seconds of a step under each task's tool: task, model, mode -> pass -> variant -> one value a round."""
    from _graph_models import models

    return without_and_with(dict(list(models(quick).items())[: 1 if quick else None]), quick)


def short_cache(quick: bool) -> dict[str, Any]:
    """The same of steps that take as little time as an accelerator's."""
    from _graph_models import short_models

    return without_and_with(short_models(quick), quick)


def without_and_with(models: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Seconds of steps with the cache and without."""
    from _graph_models import MODES

    found: dict[str, Any] = {}
    for (name, model), (mode, make), (title, training) in product(
        models.items(), MODES.items(), passes(quick).items()
    ):
        step = make(model, training)
        for task, new in TASKS.items():
            progress(f"  cache, {task}, {name}, {mode}, {title}")
            tool = new()
            off: Callable[[], AbstractContextManager[Any]] = lambda tool=tool: without_cache(tool)  # noqa: E731
            variants = {"bare": controls()["bare"], ON: under(tool), OFF: off}
            found.setdefault(f"{task}: {name}, {mode}", {})[title] = interleaved(
                variants, lambda _, step=step: seconds(step), 0 if quick else 4, 1 if quick else 3, 20
            )
    return found


def on_one_core() -> None:
    """Keep this process on the last of its cores; before TensorFlow is imported."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def benchmark(quick: bool) -> dict[str, Any]:
    """Everything about graphs, on the last core."""
    on_one_core()
    return {
        "hits": hits(quick), "steps": steps(quick), "rewrites": rewrites(quick), "cache": cache(quick),
        "short cache": short_cache(quick),
    }  # fmt: skip


if __name__ == "__main__":
    script(benchmark, __doc__)
