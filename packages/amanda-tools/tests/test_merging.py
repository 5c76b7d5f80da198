"""Results of several ranks, processes or runs as one, and files of results read back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda.tools.command import merge as command
from amanda.tools.flops import FlopsResult, FlopsTool
from amanda.tools.results import Column, Result, Table, by_rank, gather, load, merge
from amanda.tools.stats import StatsTool


class Seen(Result):
    """A result that says in its columns how it is merged."""

    name = "seen"
    title = "Seen"
    columns = (
        Column("type"), Column("calls", total=True, merge="sum"), Column("least", merge="min"),
        Column("most", merge="max"), Column("mean", merge="mean"),
    )  # fmt: skip

    def __init__(self, rows: Sequence[Sequence[Any]], note: str = "All is well.") -> None:
        self._rows, self._note = rows, note

    def rows(self) -> Sequence[Sequence[Any]]:
        return self._rows

    def notes(self) -> Sequence[str]:
        return ["Of ops.", self._note]


def test_columns_say_how_rows_are_merged() -> None:
    first = Seen([("relu", 2, 1.0, 5.0, 2.0), ("mm", 1, 0.0, 0.0, None)])
    second = Seen([("relu", 3, 0.5, 4.0, 4.0), ("mm", 1, 0.0, 0.0, 7.0)], "All is not.")
    merged = merge({"rank0": first, "rank1": second})
    assert merged.rows() == [["relu", 5, 0.5, 5.0, 3.0], ["mm", 2, 0.0, 0.0, 7.0]]
    assert merged.to_dict()["notes"] == [
        "Of ops.", "rank0: All is well.", "rank1: All is not.", "Of rank0 and rank1 together.",
    ]  # fmt: skip
    assert merged.to_dict()["schema"] == "amanda.seen"
    assert ["total", "7"] in [line.split() for line in str(merged).splitlines()]


def test_rows_by_rank_keep_each_rank_apart() -> None:
    table = by_rank({"rank0": Seen([("relu", 2, 1, 5, 2)]), "rank10": Seen([("relu", 3, 1, 5, 2)])})
    assert [column.name for column in table.columns][:3] == ["rank", "type", "calls"]
    assert [list(row[:3]) for row in table.rows()] == [[0, "relu", 2], [10, "relu", 3]]
    assert table.to_dict()["of"] == "seen"


def test_results_of_several_tools_are_not_merged() -> None:
    with pytest.raises(AmandaError, match="of one tool are merged: rank0 has seen 1, rank1 has flops 1"):
        merge({"rank0": Seen([]), "rank1": FlopsResult([])})
    with pytest.raises(AmandaError, match="no result"):
        merge({})


def measured(rows: int) -> tuple[FlopsTool, StatsTool]:
    torch.manual_seed(rows)
    model, tools = nn.Linear(4, 2), (FlopsTool(), StatsTool())
    with amanda.apply(*tools):
        model(torch.rand(rows, 4)).sum().backward()
    return tools


def test_a_file_is_read_back_as_its_tools_result(tmp_path: Path) -> None:
    flops, _ = measured(3)
    path = flops.result.save(tmp_path / "flops.json")
    again = load(path)
    assert isinstance(again, FlopsResult)
    assert again.to_dict() == flops.result.to_dict()
    unknown = json.loads(path.read_text()) | {"schema": "amanda.ours"}
    path.write_text(json.dumps(unknown))
    table = load(path)
    assert isinstance(table, Table)
    assert table.to_dict() == unknown


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"schema": "amanda.flops", "version": 99}', "3"])
def test_a_file_of_anything_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(AmandaError, match=r"x\.json"):
        load(tmp_path / "x.json")


def test_files_are_merged_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, rows in ((0, 3), (2, 5)):
        for tool in measured(rows):
            tool.result.save(tmp_path / f"rank{rank}.{tool.result.name}.json")
    files = [str(tmp_path / f"rank{rank}.flops.json") for rank in (0, 2)]
    assert command([*files, "-o", str(tmp_path / "both.json"), "--ranks", "4"]) == 0
    told = capsys.readouterr().out
    assert "Of rank0 and rank2 together." in told
    assert "There is no result of rank1 and rank3." in told
    merged = load(tmp_path / "both.json")
    assert isinstance(merged, FlopsResult)
    assert merged.total("macs", "forward") == (3 + 5) * 4 * 2
    assert merged.remarks[-1] == "There is no result of rank1 and rank3."
    # A folder has several tools; what is merged lies beside what it is merged of, and is not taken again.
    for _ in range(2):
        assert command([str(tmp_path), "-q"]) == 0
    assert load(tmp_path / "flops.json").rows() == merged.rows()
    assert (tmp_path / "stats.json").exists()
    assert command([*files, "-o", str(tmp_path / "ranks.csv"), "--per-rank"]) == 0
    assert (tmp_path / "ranks.csv").read_text().startswith("rank,phase,type")
    assert capsys.readouterr().err == ""


def test_what_cannot_be_merged_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([str(tmp_path)]) == 2
    assert "has no results of processes, such as rank0.flops.json" in capsys.readouterr().err
    assert command([str(tmp_path / "absent.json")]) == 2
    assert "absent.json cannot be read" in capsys.readouterr().err


def test_gathering_without_a_process_group_is_an_error() -> None:
    with pytest.raises(
        AmandaError, match=r"there is no process group: torch\.distributed\.init_process_group"
    ):
        gather(Seen([]))
