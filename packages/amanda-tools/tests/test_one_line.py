"""One call that counts or measures a model, the tree of its modules, and what objects say of themselves."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import AmandaError, OptionError
from amanda.tools.flops import FlopsResult, FlopsTool, count_flops, summary
from amanda.tools.profile import profile


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"layers": nn.Sequential(*(Layer() for _ in range(3)))})
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body["layers"](x))


MODEL, X = Network(), torch.rand(5, 4)


def test_flops_of_a_call_are_those_of_a_scope() -> None:
    tool = FlopsTool()
    with amanda.apply(tool):
        MODEL(X)
    assert count_flops(MODEL, X).total() == tool.result.total()
    assert {row.module: row.macs for row in count_flops(MODEL, X) if row.macs}["head"] == 5 * 4 * 2


def test_a_summary_adds_up_modules_and_combines_layers() -> None:
    tree = summary(MODEL, X, depth=2)
    rows = {row.module: row for row in tree}
    layers = "body.layers.0-2"
    assert list(rows) == ["", layers, f"{layers}.up", f"{layers}.down", "head"]
    assert rows[""].parameters == sum(parameter.numel() for parameter in MODEL.parameters())
    assert rows[""].flops == rows[layers].flops + rows["head"].flops
    assert rows[layers].share + rows["head"].share == pytest.approx(1)
    assert [line.split("  ")[:3] for line in str(tree).splitlines() if "%" in line][1:3] == [
        ["", layers, ""], ["", "", "up"],
    ]  # fmt: skip
    assert str(tree).splitlines()[0] == "Network"


def test_a_tree_has_as_many_levels_as_asked() -> None:
    result = count_flops(MODEL, X)
    assert [row.module for row in result.tree(1)] == ["", "body.layers.0-2", "head"]
    with pytest.raises(OptionError, match="depth"):
        summary(MODEL, X, depth=0)


def modules_of(table: str) -> list[str]:
    return [line.split()[0] for line in table.splitlines() if "%" in line]


def test_the_table_of_a_tree_is_as_deep_long_and_sorted_as_asked() -> None:
    tree = count_flops(MODEL, X).tree(1)
    assert modules_of(tree.table()) == ["total", "body.layers.0-2", "head"]
    assert modules_of(tree.table(depth=2)) == ["total", "body.layers.0-2", "up", "down", "head"]
    assert modules_of(tree.table(depth=2, sort="parameters")) == [
        "total", "body.layers.0-2", "up", "down", "head",
    ]  # fmt: skip
    # Sorted within each module: what lies in a module stays below it.
    small_first = count_flops(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Layer(), nn.ReLU())), X).tree(2)
    assert modules_of(small_first.table()) == ["total", "0", "1", "0", "1"]
    assert modules_of(small_first.table(sort="FLOPs")) == ["total", "1", "0", "1", "0"]
    assert modules_of(small_first.table(top=2)) == ["total", "0"]
    assert "Showing 2 of 5 rows." in small_first.table(top=2)
    with pytest.raises(AmandaError, match="no column 'flop'; there are FLOPs, MACs"):
        tree.table(sort="flop")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("top", -1, "an integer >= 1 or None"), ("top", 2.5, "an integer >= 1"), ("depth", 0, "an integer >= 1"),
     ("sort", None, "a string")],
)  # fmt: skip
def test_a_table_says_which_values_it_takes(option: str, value: object, expected: str) -> None:
    result = count_flops(MODEL, X)
    for table in (result, result.tree()):
        with pytest.raises(OptionError, match=f"{option} is {value}; give {expected}"):
            table.table(**{option: value})


def test_a_keyword_of_the_model_may_have_any_name() -> None:
    def scaled(x: torch.Tensor, model: float, function: float) -> torch.Tensor:
        return x * model * function

    keywords = {"model": 2.0, "function": 3.0}
    assert count_flops(scaled, X, **keywords).total("calls") == 2
    assert summary(scaled, X, **keywords).rows()[0][1] == 2
    assert profile(scaled, X, **keywords)[0].calls == 2


def test_rows_by_module_are_printed_as_a_tree_also_when_merged() -> None:
    tool = FlopsTool(depth=1)
    with amanda.apply(tool):
        MODEL(X)
    lines = str(tool.result.merged(tool.result)).splitlines()
    assert [line.split()[0] for line in lines if "%" in line] == ["total", "body.layers.0-2", "head"]
    table = tool.result.table(sort="flops")
    assert "%" not in table
    assert "Sorted rows are a flat table, without a sort a tree of modules." in table
    # Rows and files have each op in one module alone.
    assert sum(row.flops for row in tool.result) == tool.result.total()
    assert isinstance(FlopsResult.from_dict(tool.result.to_dict()), FlopsResult)


def test_a_profile_of_a_function_leaves_the_first_call_out() -> None:
    calls = []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return MODEL(x).sum()

    result = profile(step, X, calls=2)
    assert len(calls) == 3
    assert {row.calls for row in result if row.type == "linear"} == {2}
    assert [row.module for row in result.tree(1)] == ["", "body.layers.0-2", "head"]


def test_objects_say_what_they_hold() -> None:
    tool = FlopsTool()
    assert repr(tool).startswith("FlopsTool: ")
    with amanda.apply(tool):
        MODEL(X)
    assert repr(tool) == f"FlopsTool: {tool.result.headline}; .result"
    assert repr(tool.result) == "FlopsResult: 2.36 k FLOPs, 1 k MACs, 13 calls"
    public = {name for name in dir(tool.result) if not name.startswith("_")}
    assert public == set(
        """
        by columns from_dict headline keys lead merged missing name notes ops remarks rows save table title
        to_csv to_dict to_html to_json to_pandas total tree unseen unsupported version whole
        """.split()
    )


class Vague(amanda.Tool):
    """A tool whose result has an array for a headline."""

    @property
    def result(self) -> nn.Module:
        holder = nn.Module()
        holder.headline = torch.zeros(2)
        return holder


def test_a_headline_that_is_neither_true_nor_false_is_left_out() -> None:
    assert "Vague object at" in repr(Vague())


def test_a_tree_is_pickled_and_of_no_op_says_so() -> None:
    tree = count_flops(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)).tree()
    assert str(pickle.loads(pickle.dumps(tree))) == str(tree)
    assert "No op that this tool selects ran" in str(profile(lambda: None).tree())


def test_totals_of_a_phase_that_does_not_exist_are_an_error() -> None:
    result = count_flops(nn.Linear(2, 2), torch.ones(1, 2))
    assert result.total("macs", "backward") == 0
    with pytest.raises(AmandaError, match="no phase 'forwards'; did you mean forward"):
        result.total("macs", "forwards")
