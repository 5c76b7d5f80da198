"""Streams and synchronisation: tools add no wait, values on side streams stay right, CUDA graphs are told."""

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _cases import Cases, bare
from _device import ON_GPU, placed, synchronize
from _measure import QUICK
from _tools import Inserting
from copies import copied
from torch import Tensor, nn

import amanda
from amanda.testing import EqualCopies, Silent, Unchanged

Make = Callable[[], amanda.Tool]
ASYNCHRONOUS: dict[str, Make] = {
    "empty": Inserting, "looking": Silent, "echo": Unchanged, "fresh": lambda: EqualCopies(copied),
    **{name: functools.partial(amanda.load_tool, name) for name in ("flops", "trace", "profile", "coverage")},
    "prune": functools.partial(amanda.load_tool, "prune", sparsity=0.5),
}  # fmt: skip
"""Tools that read no value of a tensor when an op runs again."""
READING: dict[str, Make] = {
    "stats": functools.partial(amanda.load_tool, "stats"), "nan": functools.partial(amanda.load_tool, "nan"),
    "quantize": functools.partial(amanda.load_tool, "quantize", method="dynamic"),
}  # fmt: skip
WIDE = 64 if QUICK else 2048
ASLEEP = 400_000_000
"""Cycles that the GPU is kept busy, about a fifth of a second."""
SAID, REPLAYED = "called a synchronizing", "what a graph recorded runs as it is"


def layers() -> nn.Module:
    """Return layers that take a GPU longer than the processor takes to start them."""
    return nn.Sequential(*(one for _ in range(6) for one in (nn.Linear(WIDE, WIDE), nn.GELU())))


def stage(cases: Cases) -> None:
    """Look at synchronisation, side streams and CUDA graphs under tools."""
    model, x = placed(layers), placed(lambda: torch.randn(64, WIDE))
    train(model, x)
    for name, make in (ASYNCHRONOUS | READING).items():
        cases(f"synchronisation, {name}", waiting, model, x, make(), name in ASYNCHRONOUS)
    for name, make in ASYNCHRONOUS.items():
        cases(f"side streams, {name}", beside, model, x, make())
    if not ON_GPU:
        cases.skip("ahead of the GPU, and CUDA graphs", "needs a GPU")
        return
    for name, make in ASYNCHRONOUS.items():
        cases(f"ahead of the GPU, {name}", ahead, model, x, make())
    for name, make in (ASYNCHRONOUS | READING).items():
        cases(f"CUDA graph captured in a scope, {name}", captured, model, x, make(), name in ASYNCHRONOUS)
    cases("CUDA graph captured before a scope", replayed, model, x)
    cases("callables that torch makes graphs of", graphed, x)


def train(model: nn.Module, x: Tensor) -> None:
    """Run a forward and backward pass."""
    model.zero_grad()
    model(x).sum().backward()


def waits(model: nn.Module, x: Tensor) -> list[str]:
    """Return what torch says of the synchronisations of a step."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            train(model, x)
        finally:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
    return [f"{one.filename}:{one.lineno}: {one.message}" for one in told if SAID in str(one.message)]


def waiting(model: nn.Module, x: Tensor, tool: amanda.Tool, held: bool) -> dict[str, Any]:
    """Return synchronisations of a bare step, of one that is analysed, and of one that is known.

    held: whether more than those of the bare step are amiss.
    """
    alone = waits(model, x)
    with amanda.apply(tool):
        first, _, later = (waits(model, x) for _ in range(3))
    found = {"bare": len(alone), "first": len(first), "later": len(later), "where": (first + later)[:5]}
    return {**found, "amiss": later if held and len(later) > len(alone) else []}


def ahead(model: nn.Module, x: Tensor, tool: amanda.Tool) -> dict[str, Any]:
    """Return seconds until a step has been started, while the GPU is busy with something before it."""
    with amanda.apply(tool):
        for _ in range(2):
            train(model, x)
        synchronize()
        begun = time.perf_counter()
        torch.cuda._sleep(ASLEEP)
        train(model, x)
        started = time.perf_counter() - begun
        synchronize()
        ended = time.perf_counter() - begun
    late = started > 0.9 * ended
    return {"started": started, "ended": ended, "amiss": ["it waited for the GPU"] if late else []}


def beside(model: nn.Module, x: Tensor, tool: amanda.Tool) -> dict[str, Any]:
    """Return how often results on two streams differ in many rounds, those of pruning from its first."""
    wanted, rounds = on_two_streams(model, x), 3 if QUICK else 20
    with amanda.apply(tool) as scope:
        found = [on_two_streams(model, x) for _ in range(rounds)]
    wanted = found[0] if "prune" in type(tool).__module__ else wanted
    wrong = sum(not all(map(torch.equal, one, wanted)) for one in found)
    amiss = [f"{wrong} of {rounds} rounds differ"] if wrong else []
    return {"rounds": rounds, "report": str(scope.report), "amiss": amiss}


def on_two_streams(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return an output and gradients, of which a side stream computes a part, ordered by an event."""
    model.zero_grad()
    y = model(x)
    if ON_GPU:
        side, done = torch.cuda.Stream(), torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = model(y).square()
            done.record()
        z.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_event(done)
    else:
        z = model(y).square()
    (z.mean() + y.sum()).backward()
    synchronize()
    return [z.detach().clone(), *gradients(model)]


def gradients(model: nn.Module) -> list[Tensor]:
    """Return copies of a model's gradients."""
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def capture(model: nn.Module, x: Tensor) -> tuple[Any, Tensor]:
    """Return a CUDA graph of a model's forward pass, and its output."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(3):
                model(x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            return graph, model(x)


def captured(model: nn.Module, x: Tensor, tool: amanda.Tool, held: bool) -> dict[str, Any]:
    """Return what a graph that is captured in a scope gives, against the same ops run under the tool.

    held: whether an exception in the capture is amiss; a tool that reads values cannot be captured.
    """
    x, error = x.clone(), ""
    with torch.no_grad(), amanda.apply(tool) as scope:
        try:
            graph, y = capture(model, x)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            return {"error": error, "report": str(scope.report), "amiss": [error] if held else []}
        x.mul_(2)
        graph.replay()
        synchronize()
        right = torch.allclose(y, model(x), rtol=1e-4, atol=1e-5)
    return told(scope, "" if right else "a replay gives something else than the ops")


def replayed(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Return what a scope says of a graph that was captured before it."""
    graph, y = bare(capture, model, x)
    wanted = y.clone()
    with amanda.apply(tool := Silent()) as scope:
        graph.replay()
        synchronize()
    right = torch.equal(y, wanted) and tool.calls == 0
    return told(scope, "" if right else "the replay is not what it was")


def told(scope: Any, wrong: str) -> dict[str, Any]:
    """Return the report of a scope in which a graph was replayed, and what is amiss."""
    unsaid = "" if REPLAYED in str(scope.report) else "the replay is not in the report"
    return {"report": str(scope.report), "amiss": [one for one in (wrong, unsaid) if one]}


def graphed(x: Tensor) -> dict[str, Any]:
    """Return how training differs in which the forward and backward pass are graphs, made in a scope."""

    def program() -> list[Tensor]:
        model = placed(layers)
        graph = torch.cuda.make_graphed_callables(model, (x,))
        for _ in range(2):
            train(graph, x)
        synchronize()
        return gradients(model)

    wanted = bare(program)
    with amanda.apply(Unchanged()) as scope:
        found = program()
    return told(scope, "" if all(map(torch.equal, found, wanted)) else "gradients differ")
