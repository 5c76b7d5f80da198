"""Seven tools in one scope on BERT's training: each gives what it gives alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import amanda
from amanda.tools.coverage import CoverageTool
from amanda.tools.dump import DumpTool
from amanda.tools.flops import FlopsTool
from amanda.tools.nan import NanTool
from amanda.tools.profile import ProfileTool
from amanda.tools.pytest._asserts import listing
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool

STEPS = 2


@pytest.fixture
def training(bert) -> Callable[[], list[torch.Tensor]]:
    """Function that trains a BERT for some steps from the same weights, and gives what they became."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 50}
    model = bert(num_hidden_layers=1, **sizes)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    tokens = torch.arange(24).reshape(2, 12)

    def train() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            _, pooled = model(tokens)
            pooled.square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    train()  # what is done but once is done
    return train


def tools(folder: Path) -> dict[str, amanda.Tool]:
    return {
        "trace": TraceTool(), "flops": FlopsTool(), "profile": ProfileTool(), "stats": StatsTool(),
        "dump": DumpTool(folder, executions=None), "nan": NanTool(), "coverage": CoverageTool(),
    }  # fmt: skip


def told(name: str, tool: Any) -> Any:
    """What a tool found, without times and names of folders."""
    if name == "trace":
        return listing(tool.graph), [(op.id, op.calls) for op in tool.graph.ops]
    if name == "profile":
        names = [column.name for column in tool.result.columns]
        wanted = [names.index(one) for one in ("phase", "type", "module", "source", "calls")]
        return Counter(tuple(row[i] for i in wanted) for row in tool.result.rows())
    if name == "nan":
        return tool.result.rows(), tool.result.executions, tool.result.passed_on
    return [repr(row) for row in tool.result.rows()]


@pytest.mark.slow
def test_each_tool_gives_beside_six_others_what_it_gives_alone(training: Any, tmp_path: Path) -> None:
    vanilla = training()
    together = tools(tmp_path / "together")
    with amanda.apply(*together.values()) as scope:
        trained = training()
    assert scope.report == []
    assert all(torch.equal(one, other) for one, other in zip(vanilla, trained, strict=True))
    alone = tools(tmp_path / "alone")
    for name, tool in alone.items():
        with amanda.apply(tool):
            training()
        found, wanted = told(name, together[name]), told(name, tool)
        assert found == wanted, name
        assert len(str(wanted)) > 1000 or name == "nan"
    flops, coverage = together["flops"].result, together["coverage"].result  # type: ignore[attr-defined]
    executed = together["nan"].result.executions  # type: ignore[attr-defined]
    assert flops.total("calls") == coverage.total("calls") > executed > 300
