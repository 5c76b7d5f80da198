"""Figure 8 on a processor: the kernels of oneDNN that each operator of ResNet-50 runs, and their times.

What CUPTI is on a GPU is here oneDNN's own account of its kernels, which an Amanda tool reads around each
operator.  It goes to the process's standard output, which is a file meanwhile.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from _measure import QUICK, pin_to_one_core, progress
from _models import training
from _zoo import RESNET, in_pytorch
from torch.backends import mkldnn

import amanda
from amanda.tools.mapping import StandardMapping

STEPS = 10


class KernelTool(amanda.Tool):
    """Times operators by their types, and reads in a file which kernels were run within each.

    types: (phase, type) -> "calls", "ms", and "kernels": name -> [runs, ms].
    """

    def __init__(self, account: Path) -> None:
        self._account = account.open()
        self.types: dict[tuple[str, str], dict[str, Any]] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def of_step(self, step: Callable[[], None]) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the types of a step."""
        self.types = {}
        step()
        return self.types

    def _forward(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._begin, inputs=[])
        context.insert_after_op(self._end, outputs=[], type=("forward", context["type"]))

    def _backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self._begin, grad_outputs=[])
        kind = ("backward", context["backward_type"])
        context.insert_after_backward_op(self._end, grad_inputs=[], type=kind)

    def _begin(self) -> None:
        self._account.read()
        self._begun = time.thread_time()

    def _end(self, type: tuple[str, str]) -> None:
        taken = 1e3 * (time.thread_time() - self._begun)
        here = self.types.setdefault(type, {"calls": 0, "ms": 0.0, "kernels": {}})
        here["calls"] += 1
        here["ms"] += taken
        for name, milliseconds in kernels(self._account.read()):
            runs = here["kernels"].setdefault(name, [0, 0.0])
            runs[0] += 1
            runs[1] += milliseconds


def kernels(account: str) -> Iterator[tuple[str, float]]:
    """Yield kernel and milliseconds of each line of oneDNN's account that is of a kernel's run."""
    for line in account.splitlines():
        cells = line.split(",")
        if cells[0] == "onednn_verbose" and cells[2:4] == ["primitive", "exec"]:
            algorithm = next((one.removeprefix("alg:") for one in cells if one.startswith("alg:")), "")
            yield ", ".join(one for one in (cells[5], cells[6], algorithm) if one), float(cells[-1])


@contextmanager
def output_into(file: Path) -> Iterator[None]:
    """Let what the process writes to its standard output go to a file."""
    kept = os.dup(1)
    with file.open("w") as target:
        os.dup2(target.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def benchmark() -> dict[str, Any]:
    """Return the types of ops of a training step: calls, milliseconds, runs and times of each kernel."""
    pin_to_one_core()
    pair = in_pytorch()[RESNET]
    step = training(*pair.wide())
    progress(f"  {RESNET}")
    step()
    with tempfile.TemporaryDirectory(prefix="amanda-bench-") as scratch:
        account = Path(scratch, "account")
        with output_into(account), mkldnn.verbose(mkldnn.VERBOSE_ON):
            tool = KernelTool(account)
            with amanda.apply(tool):
                step()
                found = [tool.of_step(step) for _ in range(1 if QUICK else STEPS)]
    return {"example": pair.example, "ops": medians(found)}


def medians(steps: list[dict[tuple[str, str], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return calls of a step, and medians of times over steps; what takes longest comes first."""
    ops = [
        {
            "phase": phase, "type": kind, "calls": one["calls"],
            "ms": median(step[phase, kind]["ms"] for step in steps),
            "kernels": {
                name: [runs, median(step[phase, kind]["kernels"][name][1] for step in steps)]
                for name, (runs, _) in one["kernels"].items()
            },
        }
        for (phase, kind), one in steps[0].items()
    ]  # fmt: skip
    return sorted(ops, key=lambda one: -one["ms"])
