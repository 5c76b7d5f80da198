"""Train a BERT that is pruned, quantised, counted and measured at once, in one scope.

    python examples/compressed_bert.py [--base] [--steps N]

A small BERT learns which half of a sequence has more distinct tokens; --base takes a BERT-base.
"""

import argparse
from typing import Any, NamedTuple

import torch
from models import bert
from torch import Tensor, nn

import amanda
from amanda.tools.effective_flops import EffectiveResult, effective
from amanda.tools.flops import FlopsTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool

SMALL = {
    "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class Classifier(nn.Module):
    """A BERT with a linear layer on what it pools."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.bert = bert(**config)
        self.head = nn.Linear(config.get("hidden_size", 768), 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bert(tokens)[1])


class Tools(NamedTuple):
    """What is applied together: weights are pruned, then quantised, then what is executed is looked at."""

    prune: PruneTool
    quantize: QuantizeTool
    flops: FlopsTool
    stats: StatsTool


def make_tools() -> Tools:
    """Half of the weights dropped by a schedule; 4 bits for weights and 8 for activations, learned."""
    prune = PruneTool(sparsity=0.5, schedule="cubic", begin=2, end=10, frequency=2)
    return Tools(prune, QuantizeTool("lsq", weight_bits=4, activation_bits=8), FlopsTool(), StatsTool())


def batch(size: int, generator: torch.Generator, length: int = 16) -> tuple[Tensor, Tensor]:
    """Tokens (size, length), and which half has more distinct ones."""
    tokens = torch.randint(0, 64, (size, length), generator=generator)
    halves = [torch.tensor([row.unique().numel() for row in half]) for half in tokens.chunk(2, dim=1)]
    return tokens, (halves[0] < halves[1]).long()


def train(model: nn.Module, tools: Tools, steps: int, generator: torch.Generator) -> list[float]:
    """Losses of training with the tools, whose scales are trained too."""
    tokens, _ = batch(32, generator)
    tools.quantize.prepare(model, tokens)
    optimizer = torch.optim.AdamW([*model.parameters(), *tools.quantize.parameters()], lr=1e-3)
    losses = []
    with amanda.apply(*tools):
        for _ in range(steps):
            tokens, labels = batch(32, generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def of_one_pass(model: nn.Module, tools: Tools, tokens: Tensor) -> EffectiveResult:
    """What is left of the multiply-accumulates of one forward pass."""
    tools.flops.clear()
    with amanda.apply(*tools), torch.no_grad():
        model(tokens)
    return effective(tools.flops.result, tools.prune.result, tools.quantize.result)


def main() -> None:
    """Train, and print what is left of each op."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--base", action="store_true", help="a BERT-base")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model, tools = Classifier(**({} if options.base else SMALL)), make_tools()
    losses = train(model, tools, options.steps, generator)
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} steps")
    print(of_one_pass(model, tools, batch(1, generator)[0]))
    print(f"{len(tools.stats.result.rows())} tensors were measured")


if __name__ == "__main__":
    main()
