"""The example that counts what hooks of modules see, against hooks of modules."""

from pathlib import Path

import pytest
import torch
from torch import nn

import amanda
from amanda.tools.coverage import CoverageResult, CoverageTool

PAGE = Path(__file__).parents[2] / "docs/tools/coverage.md"


def test_what_is_seen_whole_is_what_hooks_count(resnet50, bert) -> None:
    def covered(model: nn.Module, x: torch.Tensor) -> CoverageResult:
        tool = CoverageTool()
        with amanda.apply(tool):
            model(x)
        return tool.result

    for model, x in (
        (resnet50().eval(), torch.rand(1, 3, 32, 32)),
        (bert(num_hidden_layers=2, attn_implementation="sdpa").eval(), torch.ones(1, 8, dtype=torch.long)),
    ):
        called: list[nn.Module] = []
        handles = [
            one.register_forward_hook(lambda module, *_, called=called: called.append(module))
            for one in model.modules()
            if not list(one.children())
        ]
        result = covered(model, x)
        assert result.total("whole", "forward") == len(called)
        assert result.total("whole", "forward") < result.total("calls", "forward")
        for handle in handles:
            handle.remove()
        assert covered(model, x).rows() == result.rows()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ResNet-50", "BERT-base, SDPA"])
def test_the_page_says_what_the_example_counts(name: str, example) -> None:
    assert example("hook_coverage").row(name) in PAGE.read_text()
