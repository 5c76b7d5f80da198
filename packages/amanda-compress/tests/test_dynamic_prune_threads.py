"""One tool of dynamic pruning for threads that execute a model at once."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.dynamic_prune import (
    ActivationPruneTool,
    AttentionPruneTool,
    DynamicChannelPruneTool,
    DynamicPruneTool,
)
from amanda.tools.dynamic_prune._base import PerThreadState

THREADS, ROUNDS = 8, 6


@pytest.fixture(autouse=True)
def threads_that_alternate_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(self.first(x).relu())
        return y


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU()
    ).eval()


def branches() -> nn.Module:
    return nn.Sequential(Residual(), Residual())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


KINDS: dict[str, tuple[Callable[[], DynamicPruneTool], Callable[[], nn.Module], tuple[int, ...]]] = {
    "channels": (lambda: DynamicChannelPruneTool(penalty=0.1), convolutions, (3, 8, 8)),
    "positions": (lambda: ActivationPruneTool(0.3), branches, (3, 8, 8)),
    "tokens": (lambda: AttentionPruneTool(keep=0.5), encoder, (12, 16)),
    "learned tokens": (lambda: AttentionPruneTool(by="learned", keep=0.5), encoder, (12, 16)),
}


def step(model: nn.Module, tool: DynamicPruneTool, x: Tensor) -> list[Tensor]:
    """The output, the loss of the tool, and the gradients of both at the input."""
    x = x.clone().requires_grad_()
    y, loss = model(x), tool.loss()
    (gradient,) = torch.autograd.grad(y.square().sum() + loss, x)
    return [y.detach(), torch.as_tensor(loss).detach(), gradient]


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    start = threading.Barrier(THREADS)

    def begin(i: int) -> Any:
        start.wait()
        return work(i)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


@pytest.mark.parametrize("copies", [False, True], ids=["one model", "copies"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_get_what_they_get_one_after_another(kind: str, copies: bool) -> None:
    make, network, shape = KINDS[kind]
    torch.manual_seed(0)
    model = network()
    models = [copy.deepcopy(model) if copies else model for _ in range(THREADS)]
    inputs = [torch.randn(2 + i % 3, *shape) for i in range(THREADS)]
    tool = make()
    for one in models if copies else models[:1]:
        tool.prepare(one, inputs[0])
    tool.clear()
    with amanda.apply(tool):
        wanted = []
        for i in range(THREADS):  # each on its own thread: the loss is of all that a thread executed
            with ThreadPoolExecutor(1) as pool:
                wanted.append(pool.submit(step, models[i], tool, inputs[i]).result())
        macs = sum(row[7] for row in tool.result.rows())
        tool.clear()
        found = in_threads(lambda i: [step(models[i], tool, inputs[i]) for _ in range(ROUNDS)])
    for i in range(THREADS):
        for one in found[i]:
            for is_, be in zip(one, wanted[i], strict=True):
                assert torch.equal(is_, be)
    assert sum(row[7] for row in tool.result.rows()) == ROUNDS * macs


def test_calls_of_one_function_get_what_they_get_one_after_another() -> None:
    random = np.random.default_rng(0)
    first, second = (
        tf.constant(random.normal(size=size), tf.float32) for size in ((3, 3, 3, 8), (3, 3, 8, 6))
    )
    inputs = [tf.constant(random.normal(size=(4, 8, 8, 3)), tf.float32) for _ in range(THREADS)]

    @tf.function
    def model(x: Any) -> Any:
        return tf.nn.relu(tf.nn.conv2d(tf.nn.relu(tf.nn.conv2d(x, first, 1, "SAME")), second, 1, "SAME"))

    tool = DynamicChannelPruneTool(penalty=0.1)

    def execute(x: Any) -> tuple[Any, Any]:
        return model(x).numpy(), tool.loss().numpy()

    with amanda.apply(tool):
        execute(inputs[0])
        wanted = [execute(x) for x in inputs]
        found = in_threads(lambda i: [execute(inputs[i]) for _ in range(ROUNDS)])
    for i in range(THREADS):
        for y, loss in found[i]:
            assert np.array_equal(y, wanted[i][0])
            assert loss == wanted[i][1]


def test_a_thread_of_the_framework_has_the_state_of_the_only_caller() -> None:
    tool = DynamicChannelPruneTool()
    state: PerThreadState[dict[str, int]] = PerThreadState(tool, dict)
    state.state_of(tool)["x"] = 1
    assert on_a_thread_of_c(lambda: state.state_of(tool)) == {"x": 1}


def test_a_thread_of_the_framework_that_serves_one_of_several_callers_is_an_error() -> None:
    tool = DynamicChannelPruneTool()
    state: PerThreadState[dict[str, int]] = PerThreadState(tool, dict)
    state.state_of(tool)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(state.state_of, tool).result()
        with pytest.raises(amanda.errors.ToolError, match=r"DynamicChannelPruneTool.*2 threads"):
            on_a_thread_of_c(lambda: state.state_of(tool))
    assert len(state._states) == 1  # state ends with its thread


def on_a_thread_of_c(function: Callable[[], Any]) -> Any:
    """Call a function on a thread that `threading` has not started."""
    import _thread

    found: list[Any] = []
    done = threading.Event()

    def work() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)
        done.set()

    _thread.start_new_thread(work, ())
    done.wait()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
