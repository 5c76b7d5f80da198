"""Dynamic pruning in a session: what it gives on the module that the model was exported from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.drivers.onnxruntime import session_options
from amanda.tools.dynamic_prune import (
    ActivationPruneTool,
    AttentionPruneTool,
    DynamicChannelPruneTool,
    DynamicPruneTool,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporting makes torch and onnxscript warn of


class Residual(nn.Module):
    """Two branches, one of which halves its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.one, self.norm, self.two = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1)
        self.halved, self.last = nn.Conv2d(6, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.shortcut = nn.Conv2d(6, 8, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.two(self.norm(self.one(x)).relu())).relu()
        made: Tensor = self.shortcut(x) + self.last(self.halved(x).relu())
        return made


class Attention(nn.Module):
    """Three layers of tokens that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in "qkv") for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            given = 2 * x
            q, k, v = (one(given).reshape(2, 9, 2, 4).permute(0, 2, 1, 3) for one in layer)  # type: ignore[attr-defined]
            made = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
            x = made.permute(0, 2, 1, 3).reshape(2, 9, 8) + x
        return x


IMAGES, TOKENS = (2, 3, 8, 8), (2, 9, 8)
CASES: dict[str, tuple[Callable[[], DynamicPruneTool], type[nn.Module], tuple[int, ...]]] = {
    "channels": (DynamicChannelPruneTool, Residual, IMAGES),
    "positions": (ActivationPruneTool, Residual, IMAGES),
    "tokens": (lambda: AttentionPruneTool(keep=0.5), Attention, TOKENS),
    "learned blocks": (lambda: AttentionPruneTool("block", "learned", block=2), Attention, TOKENS),
}  # fmt: skip


def exported(module: nn.Module, x: Tensor) -> Any:
    """A session without fusion, and what it is fed."""
    logging.disable()  # torch writes a trace of its own work into what listens, as pytest does
    try:
        program = torch.onnx.export(module, (x,), dynamo=True, verbose=False, optimize=False)
    finally:
        logging.disable(logging.NOTSET)
    assert program is not None
    model = program.model_proto
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options())
    return session, {model.graph.input[0].name: x.numpy()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_session_gives_what_the_module_does(name: str) -> None:
    make, kind, shape = CASES[name]
    torch.manual_seed(0)
    module, x = kind().eval(), torch.randn(shape)
    eager, graph, again = make(), make(), make()
    session, feed = exported(module, x)
    with torch.no_grad():
        dense = np.asarray(module(x))
        eager.prepare(module, x)  # which finds residual branches
        first = [np.array(value.detach()) for value in eager.state_dict().values()]
        for key, value in eager.state_dict().items():
            if key.endswith("skim.weight"):
                nn.init.normal_(value, std=2.0, generator=torch.Generator().manual_seed(3))
        eager.clear()
        with amanda.apply(eager):
            expected = np.asarray(module(x))
    with amanda.apply(graph):
        session.run(None, feed)
    for mine, theirs in zip(graph.state_dict().values(), first, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), theirs)
    again.load_state_dict(dict(zip(graph.state_dict(), eager.state_dict().values(), strict=True)))
    with amanda.apply(again) as scope:
        (result,) = session.run(None, feed)
    assert scope.report == []
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(result - dense).max() > 1e-2
    for mine, theirs in zip(again.result.rows(), eager.result.rows(), strict=True):
        assert mine[6:] == pytest.approx(theirs[6:], abs=1e-6)
