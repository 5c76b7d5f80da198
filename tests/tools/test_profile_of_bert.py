"""The profile of a BERT training step beside torch.profiler's: the same ops, modules and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import amanda
from amanda.tools.profile import ProfileResult, ProfileTool

MODULE = "module: "


@pytest.fixture(scope="module")
def training(bert: Callable[..., nn.Module]) -> tuple[nn.Module, Callable[[], None]]:
    """The model, and a step of its training that has run once."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = bert(vocab_size=100, **sizes).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 100, (2, 16))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens)[0].square().mean().backward()
        optimizer.step()

    step()
    return model, step


@pytest.fixture(scope="module")
def ours(training: tuple[nn.Module, Callable[[], None]]) -> ProfileResult:
    tool = ProfileTool()
    with amanda.apply(tool):
        training[1]()
    return tool.result


@pytest.fixture(scope="module")
def theirs(training: tuple[nn.Module, Callable[[], None]]) -> list[FunctionEvent]:
    model, step = training
    with in_ranges(model):
        return traced(step)


def traced(step: Callable[[], None]) -> list[FunctionEvent]:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        step()
    return list(profiler.events() or ())


@contextmanager
def in_ranges(model: nn.Module) -> Iterator[None]:
    """Let each call of a module be a range of torch.profiler."""
    open_: list[Any] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            open_.append(record_function(MODULE + name))
            open_[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        open_.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(enter(name)))
            hooks.enter_context(module.register_forward_hook(leave))
        yield


def around(event: FunctionEvent) -> Iterator[FunctionEvent]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event


def is_node(event: FunctionEvent) -> bool:
    """Whether this is a backward op itself, not the engine's work around it."""
    return "Backward" in event.name.removesuffix("AccumulateGrad") + "Backward" * (
        event.name == "torch::autograd::AccumulateGrad"
    ) and not event.name.startswith("autograd::engine")


def is_op(event: FunctionEvent) -> bool:
    """Whether this is what Python called: nothing of torch's runs around it but marks of ranges."""
    return event.name.startswith("aten::") and not any(
        one.name.startswith(("aten::", "autograd::engine")) for one in around(event)
    )


def span(event: FunctionEvent) -> float:
    """Microseconds of an op; of a backward op with what the engine makes of its gradients, such as sums."""
    end = event.time_range.end
    if is_node(event) and event.cpu_parent is not None:
        end = max(one.time_range.end for one in event.cpu_parent.cpu_children)
    return end - event.time_range.start


def module_of(event: FunctionEvent) -> str:
    return next((one.name.removeprefix(MODULE) for one in around(event) if one.name.startswith(MODULE)), "")


def test_the_ops_are_those_that_torch_saw(ours: ProfileResult, theirs: list[FunctionEvent]) -> None:
    counted: Counter[str] = Counter()
    for place in ours.ops:
        counted[place.name] += place.calls
    seen = Counter(event.name.split("::")[-1] for event in theirs if is_op(event) or is_node(event))
    # An index is what it comes to: here each is one slice or one selection.
    seen["getitem"] = seen.pop("slice") + seen.pop("select")
    # Of a tensor that is contiguous already torch asks no more than that.
    assert counted.pop("contiguous") == 4
    assert seen.pop("contiguous") == 2
    assert counted == seen
    assert counted["AddmmBackward0"] == 12
    assert sum(counted.values()) > 550


def test_forward_ops_are_in_the_modules_that_called_them(
    ours: ProfileResult, theirs: list[FunctionEvent]
) -> None:
    for name in ("linear", "layer_norm", "dropout", "gelu", "embedding", "scaled_dot_product_attention"):
        counted: Counter[str] = Counter()
        for place in ours.ops:
            if place.name == name:
                counted[place.module] += place.calls
        ops = (one for one in theirs if is_op(one) and one.name == f"aten::{name}")
        assert counted == Counter(map(module_of, ops))
        assert sum(counted.values()) >= 2


def test_backward_ops_are_in_the_modules_whose_ops_made_them(
    ours: ProfileResult, theirs: list[FunctionEvent]
) -> None:
    makers: dict[int, FunctionEvent] = {}
    for event in sorted(theirs, key=lambda one: one.time_range.start):
        in_backward = any(one.name.startswith("autograd::engine") for one in around(event))
        if event.sequence_nr >= 0 and event.name.startswith("aten::") and not in_backward:
            makers[event.sequence_nr] = event  # the last to begin with this number has made the node
    seen = Counter(
        (event.name, module_of(makers[event.sequence_nr]))
        for event in theirs
        if is_node(event) and not event.name.endswith("AccumulateGrad")
    )
    counted: Counter[tuple[str, str]] = Counter()
    for place in ours.ops:
        if place.phase == "backward" and place.name != "AccumulateGrad":
            counted[place.name, place.module] += place.calls
    assert counted == seen
    assert len(counted) > 50


def test_times_hold_those_of_torch_for_the_same_executions() -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 512))
    x = torch.rand(512, 512)
    tool = ProfileTool(memory=False)
    with amanda.apply(tool):
        for _ in range(2):
            model(x).square().mean().backward()
        tool.clear()
        events = traced(lambda: [model(x).square().mean().backward() for _ in range(5)])
    spans: dict[str, list[float]] = {}
    for event in sorted(events, key=lambda one: one.time_range.start):
        if is_op(event) or is_node(event):
            spans.setdefault(event.name.split("::")[-1], []).append(span(event))
    ratios, mine = [], {}
    for event in tool.result.timeline.events:
        mine.setdefault(event.place.name, []).append(event.took / 1000)
    for name, took in mine.items():
        assert len(took) == len(spans[name]), name
        pairs = [(one, other) for one, other in zip(took, spans[name], strict=True) if other > 100]
        ratios += [one / other for one, other in pairs]
    assert len(ratios) > 20
    # torch's are within ours; how near they are is a figure of the benchmarks, not of a busy machine.
    assert 1 <= median(ratios) < 1.5


def test_the_peak_of_memory_is_the_allocators(training: tuple[nn.Module, Callable[[], None]]) -> None:
    model, step = training
    tool = ProfileTool()
    with amanda.apply(tool):
        step()  # whose analysis keeps values longer
        model.zero_grad()
        tool.clear()
        step()
    (peak,) = tool.result.peaks
    made = peak.size - sum(size for place, size in peak.owners if place.phase == "given")
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    changes = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    alive = accumulate(one.nbytes() for one in sorted(changes, key=lambda one: one.start_ns()))
    assert made == pytest.approx(max(alive), rel=0.02)
