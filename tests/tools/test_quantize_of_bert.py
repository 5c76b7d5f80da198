"""BERT trained with quantisation beside other tools: each gives what it gives alone, also after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool


class Training:
    """A BERT that is trained from the same weights each time."""

    def __init__(self, bert: Any) -> None:
        sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 50}
        self.model = bert(num_hidden_layers=1, **sizes)
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.tokens = torch.arange(24).reshape(2, 12)

    def __call__(self, learned: Any = (), steps: int = 2, resume: bool = False) -> list[float]:
        """Losses; learned: what is trained besides.  resume: from the weights that are there."""
        torch.manual_seed(3)
        if not resume:
            self.model.load_state_dict(self.start)
        optimizer, losses = torch.optim.SGD([*self.model.parameters(), *learned], lr=0.1), []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = self.model(self.tokens)[1].square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses


@pytest.fixture
def train(bert: Any) -> Training:
    return Training(bert)


def costs(flops: FlopsTool) -> list[str]:
    """What each op cost, but for what adds up gradients: of learned scales, too."""
    return sorted(repr(row) for row in flops.result.rows() if "accumulate_grad" not in row)


@pytest.mark.parametrize("method", ["dynamic", "qat", "lsq"])
def test_quantised_training_beside_flops_and_stats_is_the_one_alone(method: Any, train: Training) -> None:
    vanilla, alone = train(), QuantizeTool(method, 4, 4)
    with amanda.apply(alone):
        wanted = train()
    tool, flops, stats = QuantizeTool(method, 4, 4), FlopsTool(), StatsTool(gradients=False)
    with amanda.apply(tool, flops, stats) as scope:
        assert train() == wanted
    assert scope.report == []
    assert wanted != vanilla
    assert tool.result.rows() == alone.result.rows()
    bare = FlopsTool()
    with amanda.apply(bare):
        train()
    assert costs(flops) == costs(bare)
    attention = [one for one in tool.result if one.type == "scaled_dot_product_attention"]
    assert [one.tensor for one in attention] == ["input 0", "input 1", "input 2"]
    assert sum(one.tensor == "weight" for one in tool.result) == 7


def test_what_tools_see_after_it_is_quantised(train: Training) -> None:
    levels: dict[str, int] = {}

    class Levels(amanda.Tool):
        """How many numbers there are in a row of the weight of each linear layer."""

        def __init__(self) -> None:
            self.add_inst_for_op(self.look)

        def look(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "linear":
                context.insert_before_op(self.count, inputs=["weight"], module=context.get_scope())

        def count(self, weight: torch.Tensor, module: str) -> None:
            levels[module] = max(len(row.unique()) for row in weight)

    with amanda.apply(QuantizeTool("dynamic", weight_bits=3), Levels()):
        train(steps=1)
    assert set(levels.values()) <= set(range(2, 9))
    assert len(levels) == 7


@pytest.mark.parametrize("method", ["qat", "lsq"])
def test_pruning_quantisation_flops_and_stats_in_one_scope_go_on_after_a_restart(
    method: Any, train: Training, tmp_path: Path
) -> None:
    def tools() -> dict[str, amanda.Tool]:
        return {
            "prune": PruneTool(0.5), "quantize": QuantizeTool(method, 6, 8), "flops": FlopsTool(),
            "stats": StatsTool(gradients=False),
        }  # fmt: skip

    first = tools()
    with amanda.apply(*first.values()) as scope:
        train.model(train.tokens)  # parameters are there from now on
        train(first["quantize"].parameters())
        kept = {name: first[name].state_dict() for name in ("prune", "quantize")}
        torch.save([train.model.state_dict(), kept], tmp_path / "state.pt")
        wanted = train(first["quantize"].parameters(), resume=True)
    assert scope.report == []
    sparse = [one.statistics.sparsity for one in first["stats"].result.measured
              if one.tensor == "weight" and one.type == "linear"]  # fmt: skip
    assert len(sparse) == 7
    assert all(0.5 <= share < 0.8 for share in sparse)  # quantisation keeps zeros, and makes more
    bare = FlopsTool()
    with amanda.apply(bare):
        train.model(train.tokens)
    forward = [row for row in first["flops"].result.rows() if row[:2] == ("forward", "linear")]
    alone = [row for row in bare.result.rows() if row[:2] == ("forward", "linear")]
    assert [row[5] / row[4] for row in forward] == [row[5] / row[4] for row in alone]

    weights, kept = torch.load(tmp_path / "state.pt", weights_only=True)
    train.model.load_state_dict(weights)
    second = tools()
    for name, state in kept.items():
        second[name].load_state_dict(state)
    with amanda.apply(*second.values()):
        if method == "lsq":
            train.model(train.tokens)
        assert train(second["quantize"].parameters(), resume=True) == wanted
