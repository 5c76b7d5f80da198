"""Models that the tools of dynamic pruning are applied to as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.tools.dynamic_prune import ActivationPruneTool, AttentionPruneTool, DynamicChannelPruneTool

DENSITY = 0.5
VISION = {"vgg19": 16, "vgg11_bn": 8, "resnet34": 36, "squeezenet1_1": 26}


@pytest.mark.parametrize("name", VISION)
def test_a_model_of_torchvision_runs_unmodified(name: str, example: Any) -> None:
    vision = example("models").vision
    torch.manual_seed(0)
    with torch.device("meta" if name.startswith("vgg") else "cpu"):
        model = vision(name)
    if name.startswith("vgg"):
        model = model.features.to_empty(device="cpu")  # the rest has no convolutions, but 120 million weights
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.01)
    zeros: list[float] = []
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(
                lambda _, __, y: zeros.append((y.abs().amax((2, 3)) == 0).float().mean().item())
            )
    tool, x = DynamicChannelPruneTool(DENSITY), torch.randn(2, 3, 64, 64)
    with torch.no_grad(), amanda.apply(tool) as scope:
        assert model(x).isfinite().all()
    assert scope.report == []
    rows = tool.result.rows()
    assert len(rows) == VISION[name]
    assert all(row[6] >= DENSITY for row in rows)
    assert tool.result.saved >= DENSITY
    inner = zeros if name != "resnet34" else zeros[1::2]  # behind an addition fewer channels are zero
    assert min(inner) >= DENSITY


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 50,
}
LANGUAGE = {
    "Bert": SIZES,
    "Roberta": SIZES,
    "DistilBert": {"dim": 16, "hidden_dim": 32, "n_layers": 3, "n_heads": 2, "vocab_size": 50},
    "Albert": {**SIZES, "embedding_size": 16},
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", LANGUAGE)
def test_a_language_model_runs_unmodified(name: str, attention: str, example: Any) -> None:
    example("models").let_torchvision_load()
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**LANGUAGE[name], attn_implementation=attention)
    model = getattr(transformers, f"{name}Model")(config).eval()
    tokens = torch.arange(2, 26).reshape(2, 12)
    layers: list[torch.Tensor] = []
    kind = {"DistilBert": "TransformerBlock"}.get(name, f"{name}Layer")
    for module in model.modules():
        if type(module).__name__ == kind:
            module.register_forward_hook(lambda _, __, y: layers.append(y[0] if isinstance(y, tuple) else y))
    tool = AttentionPruneTool(keep=0.5)
    with torch.no_grad(), amanda.apply(tool) as scope:
        model(tokens)
    assert scope.report == []
    assert [row[6] for row in tool.result.rows()] == [0, 0.5, 0.75]
    assert len(layers) == 3
    for before, after, dropped in zip(layers, layers[1:], (6, 9), strict=False):
        stays = (before == after).all(-1).sum(1)
        assert stays.tolist() == [dropped, dropped]


def test_a_resnet_leaves_out_positions_unmodified(example: Any) -> None:
    torch.manual_seed(0)
    model = example("models").vision("resnet50", width_per_group=8, num_classes=5).eval()
    tool, x = ActivationPruneTool(), torch.randn(2, 3, 64, 64)
    tool.prepare(model, x)
    tool.clear()
    zeros: dict[str, float] = {}

    class Zeros(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "conv2d":
                context.insert_before_op(self.see, inputs=[0], path=context.get_scope())

        def see(self, value: torch.Tensor, path: str) -> None:
            zeros[path] = (value.abs().amax(1) == 0).float().mean().item()

    with torch.no_grad(), amanda.apply(tool, Zeros()):
        model(x)
    rows = tool.result.rows()
    assert len(rows) == 16 * 3
    pruned = {row[2]: row[6] for row in rows}
    for path, share in pruned.items():
        if path.endswith("conv3"):  # of 1x1: it reads what it gives
            assert zeros[path] >= share - 1e-6
    assert 0 < tool.result.saved < 1
