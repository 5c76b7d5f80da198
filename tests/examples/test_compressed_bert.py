"""Prune, quantize, flops and stats in one scope of BERT's training."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.mapping import StandardMapping

SIZES = {
    "vocab_size": 64, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class Read(amanda.Tool):
    """The weights that linear layers read, behind the tools before it."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self.look)

    def look(self, context: amanda.OpContext) -> None:
        if context["type"] == "linear":
            scope = context.get_scope()
            context.insert_before_op(lambda one: self.weights.update({scope: one}), inputs=["weight"])


@pytest.mark.slow
def test_a_pruned_and_quantised_training_survives_a_restart(example: Callable[[str], ModuleType]) -> None:
    script = example("compressed_bert")
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(0)
    model, tools = script.Classifier(**SIZES), script.make_tools()
    losses = script.train(model, tools, 12, draws)
    assert len(losses) == 12
    assert all(one.grad is not None for one in tools.quantize.parameters())
    tokens, _ = script.batch(1, draws)

    left = script.of_one_pass(model, tools, tokens)
    linear = [one for one in left.ops if one.type == "linear"]
    layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
    assert len(linear) == len(layers) == 8
    assert {(one.density, one.bits) for one in linear} == {(0.5, (8, 4))}
    (attention,) = (one for one in left.ops if one.type == "scaled_dot_product_attention")
    assert (attention.density, attention.bits) == (1.0, (8, 8))
    macs = 16 * sum(one.weight.numel() for one in layers[:-2]) + sum(
        one.weight.numel() for one in layers[-2:]
    )
    assert sum(one.macs for one in linear) == macs
    assert sum(one.bops for one in left.ops) == macs * 0.5 * 32 + 2 * 16 * 16 * 24 * 64

    def run(model: nn.Module, tools: list[amanda.Tool]) -> tuple[Tensor, dict[str, Tensor]]:
        read = Read()
        with amanda.apply(*tools, read), torch.no_grad():
            return model(tokens), read.weights

    output, weights = run(model, [tools.prune, tools.quantize])
    assert all((one == 0).float().mean() >= 0.5 for one in weights.values())
    assert all(max(row.unique().numel() for row in one) <= 16 for one in weights.values())

    other, again = script.Classifier(**SIZES), script.make_tools()
    other.load_state_dict(model.state_dict())
    again.prune.load_state_dict(tools.prune.state_dict())
    again.quantize.load_state_dict(tools.quantize.state_dict())
    assert torch.equal(run(other, [again.prune, again.quantize])[0], output)
    assert {row[2] for row in tools.stats.result.rows()} >= {"head", "bert.encoder.layer.0.output.dense"}
