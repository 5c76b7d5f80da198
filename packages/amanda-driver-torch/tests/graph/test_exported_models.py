"""Programs of models of transformers and timm, pruned in their files, run as the models do under the tool."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from torch import nn

import amanda
from amanda.tools.prune import PruneTool

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporting makes torch warn of

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
TOKENS = torch.arange(12).reshape(2, 6) * 7 % 50
IMAGE = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)


class First(nn.Module):
    """A model of transformers, which gives one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(inputs)[0]
        return output


def _transformer(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, f"{name}Config")(**options)
        return First(getattr(transformers, f"{name}Model")(config))

    return make


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: nn.Module = importlib.import_module("timm").create_model(name, num_classes=5)
        return model

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "bert": (_transformer("Bert", vocab_size=50, max_position_embeddings=16, **SMALL), TOKENS),
    "gpt2": (
        _transformer("GPT2", vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_cache=False),
        TOKENS,
    ),
    "vit": (_transformer("ViT", image_size=32, patch_size=8, **SMALL), IMAGE),
    "resnet": (_timm("test_resnet"), IMAGE),
    "efficientnet": (_timm("test_efficientnet"), IMAGE),
    "convnext": (_timm("test_convnext"), IMAGE),
}

ALONE = """
import sys
sys.modules["amanda"] = None
import torch
folder = sys.argv[1]
for name in sys.argv[2:]:
    program = torch.export.load(f"{folder}/{name}.pruned.pt2")
    with torch.no_grad():
        torch.save(program.module()(torch.load(f"{folder}/{name}.given.pt")), f"{folder}/{name}.out.pt")
"""


@contextmanager
def _unheard() -> Iterator[None]:
    """torch writes a trace of its own work into what listens, as pytest does."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.long
def test_pruned_programs_run_without_amanda(tmp_path: Path) -> None:
    for op in ("nms", "qnms"):  # of torchvision, which a CPU build lacks
        if not hasattr(torch.ops.torchvision, op):
            torch.library.define(f"torchvision::{op}", "(Tensor a, Tensor b, float c) -> Tensor")
    expected = {}
    for name, (make, inputs) in MODELS.items():
        torch.manual_seed(0)
        module = make().eval()
        tool = PruneTool()
        with torch.no_grad(), amanda.apply(tool):
            module(inputs)
            expected[name] = module(inputs)
        torch.save(inputs, tmp_path / f"{name}.given.pt")
        with _unheard():
            torch.export.save(torch.export.export(module, (inputs,)), tmp_path / f"{name}.pt2")
            again = PruneTool()
            done = amanda.instrument(tmp_path / f"{name}.pt2", again, out=tmp_path / f"{name}.pruned.pt2")
        assert again.result.zeros == tool.result.zeros > 0, name
        assert all(item.stored for item in done.inlined), name
    command = [sys.executable, "-c", ALONE, str(tmp_path), *MODELS]
    ran = children.run(command)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for name, value in expected.items():
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.out.pt"), value, msg=name)
