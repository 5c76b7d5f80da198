"""Models that torch.onnx.export writes: one tool on the module and on its session gives the same."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import ModelProto
from torch import nn

import amanda
from amanda.drivers.onnxruntime import instrument, session_options
from amanda.tools.effective_path import EffectivePathTool
from amanda.tools.flops import FlopsTool
from amanda.tools.prune import PruneTool

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporting makes torch and onnxscript warn of


@dataclass
class Exported:
    """A module, an example, and the model that it was exported to."""

    module: nn.Module
    example: tuple[torch.Tensor, ...]
    model: ModelProto

    def session(self) -> Any:
        """A session without fusion."""
        return onnxruntime.InferenceSession(self.model.SerializeToString(), session_options())

    def __post_init__(self) -> None:
        names = [one.name for one in self.model.graph.input]
        self.feed = {name: value.numpy() for name, value in zip(names, self.example, strict=True)}

    def expected(self) -> Any:
        with torch.no_grad():
            made = self.module(*self.example)
        return np.asarray(made)


class Logits(nn.Module):
    """A model of transformers, which gives one tensor."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = getattr(self.model(*inputs), self.name)
        return made


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
TOKENS = torch.arange(12).reshape(2, 6) * 7 % 50


def _bert() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **SMALL)
    return Logits(transformers.BertModel(config, add_pooling_layer=False), "last_hidden_state"), (TOKENS,)


def _gpt2() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2, use_cache=False
    )
    return Logits(transformers.GPT2LMHeadModel(config), "logits"), (TOKENS,)


def _vit() -> tuple[nn.Module, Any]:
    import transformers

    config = transformers.ViTConfig(image_size=16, patch_size=8, **SMALL)
    return Logits(transformers.ViTModel(config, add_pooling_layer=False), "last_hidden_state"), (_image(16),)


def _of_timm(name: str, size: int, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        return importlib.import_module("timm").create_model(name, num_classes=5, **options), (_image(size),)

    return make


def _image(size: int) -> torch.Tensor:
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(1))


class Branches(nn.Module):
    """Convolutions, pooling and what moves elements between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, eps=1e-3)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4, stride=2, dilation=2, padding=2)
        self.mixed, self.fc = nn.Linear(8, 8), nn.Linear(12, 3)
        nn.init.normal_(self.bn1.weight)
        nn.init.uniform_(self.bn1.running_var, 0.5, 2)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        functional = nn.functional
        x = torch.relu(self.bn1(self.conv1(functional.pad(x, (1, 0, 0, 1)))))
        x = functional.max_pool2d(torch.relu(self.conv2(x) + x), 3, 2, 1)
        x = torch.cat([x, torch.tanh(x)], 1)[:, 2:6]
        x = functional.avg_pool2d(self.depthwise(x), 2, 1, ceil_mode=True)
        tokens = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 8)
        first, second = tokens[:, :2], tokens[:, 2:]
        mixed = (self.mixed(first) - second) @ first.transpose(1, 2) * 0.5
        scores: torch.Tensor = self.fc(torch.cat([mixed.flatten(1), second.flatten(1)[:, 8:]], 1))
        return scores


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "vit": _vit,
    "resnet": _of_timm("test_resnet", 32),
    "efficientnet": _of_timm("test_efficientnet", 32),
    "convnext": _of_timm("test_convnext", 32),
}


@cache
def exported(name: str) -> Exported:
    for op in ("nms", "qnms"):  # of torchvision, which a CPU build lacks
        if not hasattr(torch.ops.torchvision, op):
            torch.library.define(f"torchvision::{op}", "(Tensor a, Tensor b, float c) -> Tensor")
    torch.manual_seed(0)
    module, example = {**MODELS, "branches": lambda: (Branches(), (torch.rand(3, 2, 12, 12),))}[name]()
    module.eval()
    logging.disable()  # torch writes a trace of its own work into what listens, as pytest does
    try:
        program = torch.onnx.export(module, example, dynamo=True, verbose=False, optimize=False)
    finally:
        logging.disable(logging.NOTSET)
    assert program is not None
    return Exported(module, example, program.model_proto)


LARGER = ("vit", "efficientnet", "convnext")


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.long if name in LARGER else ()) for name in MODELS]
)
def model(request: pytest.FixtureRequest) -> Exported:
    return exported(request.param)


class Everywhere(amanda.Tool):
    """Gives back every value that it is given, or equal new ones, in Python, at every op; counts by type."""

    def __init__(self, anew: bool = False) -> None:
        self.anew = anew
        self.counted: dict[str, int] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.same)
        context.insert_after_op(self.count, type=context.get_op().type)

    def same(self, *values: Any) -> Any:
        return copy.deepcopy(values) if self.anew else values

    def count(self, *values: Any, type: str) -> Any:
        self.counted[type] = self.counted.get(type, 0) + 1
        return self.same(*values)


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True])
def test_routines_that_change_nothing_leave_every_bit(model: Exported, anew: bool) -> None:
    session, tool = model.session(), Everywhere(anew)
    bare = session.run(None, model.feed)
    np.testing.assert_allclose(bare[0], model.expected(), rtol=1e-4, atol=1e-4)
    with amanda.apply(tool) as scope:
        instrumented = session.run(None, model.feed)
    np.testing.assert_array_equal(instrumented[0], bare[0])
    counts: dict[str, int] = {}
    for node in model.model.graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    assert tool.counted == counts
    assert scope.report == []


class Activations(amanda.Tool):
    """What the last op of each module gives, by the module's path."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.keep, outputs=[0], path=context.get_scope())

    @amanda.observer
    def keep(self, value: Any, path: str) -> None:
        self.values[path] = np.asarray(value)


def test_activations_are_the_outputs_of_the_modules(model: Exported) -> None:
    session, tool = model.session(), Activations()
    with amanda.apply(tool):
        session.run(None, model.feed)
    outputs: dict[str, Any] = {}
    kinds = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, nn.Embedding)
    hooks = [
        module.register_forward_hook(
            lambda _, __, result, path=path: outputs.update({path: result.numpy().copy()})
        )
        for path, module in model.module.named_modules()
        if isinstance(module, kinds) and not [*module.children()]
    ]
    model.expected()
    for hook in hooks:
        hook.remove()
    compared = outputs.keys() & tool.values.keys()
    assert len(compared) == len(outputs) >= 5
    for path in compared:
        np.testing.assert_allclose(tool.values[path], outputs[path], rtol=1e-3, atol=1e-4, err_msg=path)


def _macs(tool: FlopsTool) -> int:
    return tool.result.total("macs")


def test_multiply_accumulates_are_those_of_the_module(model: Exported) -> None:
    eager, graph = FlopsTool(), FlopsTool()
    with amanda.apply(eager):
        model.expected()
    with amanda.apply(graph):
        model.session().run(None, model.feed)
    assert _macs(graph) == _macs(eager) > 0


def test_a_pruned_session_gives_what_the_pruned_module_does(model: Exported) -> None:
    eager, graph = PruneTool(), PruneTool()
    session = model.session()
    with amanda.apply(eager):
        expected = model.expected()
    with amanda.apply(graph):
        (result,) = session.run(None, model.feed)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4)
    assert graph.result.zeros == eager.result.zeros > 0
    assert np.abs(session.run(None, model.feed)[0] - result).max() > 1e-3


def test_a_pruned_file_runs_alone(model: Exported) -> None:
    made = instrument(model.model, PruneTool())
    session = onnxruntime.InferenceSession(made.SerializeToString(), session_options())
    with amanda.apply(PruneTool()):
        expected = copy.deepcopy(model.module)(*model.example).detach().numpy()
    np.testing.assert_allclose(session.run(None, model.feed)[0], expected, rtol=1e-3, atol=1e-4)


_CALLED = {"adaptive_avg_pool2d": "mean", "addmm": "linear"}


@pytest.mark.parametrize("name", ["branches", "resnet"])
def test_effective_paths_of_a_session_are_those_of_the_module(name: str) -> None:
    model = exported(name)
    eager, graph = EffectivePathTool(), EffectivePathTool()
    with torch.no_grad(), amanda.apply(eager):
        model.module(*model.example)
    session = model.session()
    with amanda.apply(graph) as scope:
        for _ in range(2):
            session.run(None, model.feed)
    assert scope.report == []
    assert graph.result.missing == eager.result.missing == {}
    for path, expected in zip(graph.paths(), eager.paths(), strict=True):
        assert path.label == expected.label
        mine, theirs = (
            [_CALLED.get(one.type, one.type) for one in each.layers.values()] for each in (path, expected)
        )
        assert mine == theirs
        for mine, theirs in zip(path.layers.values(), expected.layers.values(), strict=True):
            assert mine.sizes == theirs.sizes
            np.testing.assert_array_equal(mine.mask(), theirs.mask())
            np.testing.assert_array_equal(mine.mask("weights"), theirs.mask("weights"))
