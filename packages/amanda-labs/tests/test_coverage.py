"""Coverage: what hooks of modules see, against hooks of modules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from repository import repository_path
from torch import Tensor, nn

import amanda
from amanda.errors import AmandaError
from amanda.tools.coverage import CoverageResult, CoverageTool, OpCoverage
from amanda.tools.mapping import VOCABULARY
from amanda.tools.results import Mergeable, load


def covered(program: Callable[[], Any], tool: CoverageTool | None = None) -> CoverageResult:
    tool = tool or CoverageTool()
    with amanda.apply(tool):
        program()
    return tool.result


class Block(nn.Module):
    """A leaf of three ops beside modules of one op, and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu, self.scaled = nn.Linear(4, 4), nn.ReLU(), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.relu(self.scaled(self.linear(x)) + x))  # type: ignore[no-any-return]


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).exp().sin()


def counts(result: CoverageResult, phase: str) -> dict[str, tuple[int, ...]]:
    return {row[1]: tuple(row[2:6]) for row in result.by("phase", "type").rows() if row[0] == phase}


def test_an_op_is_seen_that_is_all_of_a_leaf_module_and_of_several_the_ends() -> None:
    model = Block()
    result = covered(lambda: [model(torch.rand(2, 4)) for _ in range(3)])
    assert counts(result, "forward") == {
        "linear": (3, 3, 3, 3), "relu": (6, 6, 6, 6), "add": (3, 0, 0, 0),
        "mul": (3, 0, 3, 0), "exp": (3, 0, 0, 0), "sin": (3, 0, 0, 3), "rand": (3, 0, 0, 0),
    }  # fmt: skip
    assert result.share("forward") == 9 / 24
    assert {place.model for place in result.ops} == {"Block", ""}


def test_backward_ops_are_seen_where_they_are_alone_and_those_of_parameters_never() -> None:
    model, x = Block(), torch.rand(2, 4, requires_grad=True)
    for _ in range(2):
        result = covered(lambda: model(x).sum().backward())
        assert counts(result, "backward") == {
            "relu_backward": (2, 2, 2, 2), "sin_backward": (1, 0, 1, 0), "exp_backward": (1, 0, 0, 0),
            "mul_backward": (1, 0, 0, 1), "add_backward": (1, 0, 0, 0), "sum_backward": (1, 0, 0, 0),
            "linear_backward": (1, 0, 1, 0), "transpose_backward": (1, 0, 0, 1),
            "accumulate_grad": (3, 0, 0, 0),
        }  # fmt: skip


def test_modules_with_modules_in_them_do_not_count() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).exp()  # type: ignore[no-any-return]

    assert counts(covered(lambda: Outer()(torch.ones(2))), "forward")["exp"] == (1, 0, 0, 0)


def test_types_without_a_word_are_listed() -> None:
    result = covered(lambda: F.logsigmoid(torch.ones(2).relu().relu()))
    assert dict(result.types) == {"relu": 2, "log_sigmoid": 1, "ones": 1}
    assert set(result.without_word) == {"log_sigmoid", "ones"}
    assert "no word for log_sigmoid (1), ones (1)" in str(result)


def test_the_vocabulary_is_that_of_the_page() -> None:
    page = repository_path("docs/vocabulary.md").read_text()
    tables = page[page.index("## Words of `type`") : page.index("## Words of your own")]
    listed = {
        word
        for line in tables.splitlines()
        if line.startswith("| `")
        for word in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert listed <= VOCABULARY
    assert len(listed) > 100


def test_it_starts_anew_and_counts_without_a_cache_and_without_gradients() -> None:
    model, tool = nn.Linear(4, 4), CoverageTool()

    def program() -> None:
        with amanda.cache_disabled(), torch.no_grad():
            model(torch.ones(2, 4))

    assert covered(program, tool).total("calls") == 2
    assert covered(program, tool).total("calls") == 4
    assert len(tool.result.ops) == 2
    tool.clear()
    assert not tool.result.ops
    assert tool.result.share() == 1
    assert counts(covered(program, tool), "forward")["linear"] == (1, 1, 1, 1)


def test_a_result_stays_as_it_is_while_the_tool_counts_on_and_after_clear() -> None:
    model, tool = nn.Linear(4, 4), CoverageTool()
    result = covered(lambda: model(torch.ones(2, 4)), tool)
    rows = result.rows()
    covered(lambda: model(torch.ones(2, 4)), tool)
    tool.clear()
    assert result.rows() == rows


def test_a_backward_pass_after_it_started_anew_takes_nothing_away() -> None:
    model, tool = Scaled(), CoverageTool()
    x = torch.rand(2, requires_grad=True)
    with amanda.apply(tool):
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        tool.clear()
        y.sum().backward()
    assert all(place.left >= 0 and place.whole >= 0 for place in tool.result.ops)
    assert torch.equal(gradient, x.grad)


def test_a_result_goes_to_files_and_refuses_unknown_keys(tmp_path) -> None:
    result = covered(lambda: nn.ReLU()(torch.ones(2)))
    content = json.loads(result.save(tmp_path / "coverage.json").read_text())
    assert content["totals"]["forward"] == {"calls": 2, "whole": 1, "entered": 1, "left": 1}
    with pytest.raises(AmandaError, match="not color"):
        result.by("color")
    types = result.by("type")
    again = load(types.save(tmp_path / "types.json"))
    assert isinstance(again, CoverageResult)
    assert again.to_dict() == types.to_dict()
    assert isinstance(amanda.load_tool("coverage"), CoverageTool)


def test_coverage_of_ranks_adds_up() -> None:
    place = OpCoverage("forward", "linear", "a", "a.py:1", "Net", 3, 2, 2, 3)
    single = CoverageResult([place])
    merged = single.merged(CoverageResult.from_dict(single.to_dict()))
    assert isinstance(merged, Mergeable)
    assert merged.rows() == [("forward", "linear", "a", "a.py:1", "Net", 6, 4, 4, 6, 4 / 6)]
    assert single.total() == 3
