"""Results of several ranks, processes or runs as one, and files of results read back."""

from __future__ import annotations

import gzip
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
        Column("most", merge="max"),
    )  # fmt: skip

    def __init__(self, rows: Sequence[Sequence[Any]], note: str = "All is well.") -> None:
        self._rows, self._note = rows, note

    def rows(self) -> Sequence[Sequence[Any]]:
        return self._rows

    def notes(self) -> Sequence[str]:
        return ["Of ops.", self._note]


def test_columns_say_how_rows_are_merged() -> None:
    first = Seen([("relu", 2, 1.0, 5.0), ("mm", 1, 0.0, None)])
    second = Seen([("relu", 3, 0.5, 4.0), ("mm", 1, 0.0, 7.0)], "All is not.")
    merged = merge({"rank0": first, "rank1": second})
    assert merged.rows() == [["relu", 5, 0.5, 5.0], ["mm", 2, 0.0, 7.0]]
    assert merged.to_dict()["notes"] == [
        "Of ops.", "rank0: All is well.", "rank1: All is not.", "Of rank0 and rank1 together.",
    ]  # fmt: skip
    assert merged.to_dict()["schema"] == "amanda.seen"
    assert ["total", "7"] in [line.split() for line in str(merged).splitlines()]


def test_remarks_stay_with_their_ranks() -> None:
    first, second = Seen([("relu", 2, 1, 5)]), Seen([("relu", 3, 1, 5)])
    first.remarks = ["One tensor is not read."]
    ranks = by_rank({"rank0": first, "rank1": second})
    assert ranks.remarks == ["rank0: One tensor is not read."]
    assert "rank0: One tensor is not read." in str(ranks)
    assert by_rank({"host": ranks}).remarks == ranks.remarks


def test_rows_by_rank_keep_each_rank_apart() -> None:
    table = by_rank({"rank0": Seen([("relu", 2, 1, 5)]), "rank10": Seen([("relu", 3, 1, 5)])})
    assert [column.name for column in table.columns][:3] == ["rank", "type", "calls"]
    assert [list(row[:3]) for row in table.rows()] == [[0, "relu", 2], [10, "relu", 3]]
    assert table.to_dict()["of"] == "seen"


def test_rows_are_the_same_merged_in_one_step_or_in_several(tmp_path: Path) -> None:
    first, second, third = (Seen([("relu", 1, 0, most), ("mm", 1, 0, None)]) for most in (2.0, 4.0, 9.0))
    pair = merge({"a": first, "b": second})
    loaded = load(pair.save(tmp_path / "pair.json"))
    for both in (pair, loaded, merge({"ab": pair})):
        assert merge({"ab": both, "c": third}).rows() == [["relu", 3, 0, 9.0], ["mm", 3, 0, None]]
        assert merge({"c": third, "ab": both}).rows() == merge({"a": first, "b": second, "c": third}).rows()
    ranks = by_rank({"rank0": pair, "rank1": third})
    assert [list(row) for row in merge({"x": ranks, "y": by_rank({"rank0": third})}).rows()] == [
        [0, "relu", 3, 0, 9.0], [0, "mm", 3, 0, None], [1, "relu", 1, 0, 9.0], [1, "mm", 1, 0, None],
    ]  # fmt: skip


def test_results_of_several_tools_are_not_merged() -> None:
    with pytest.raises(AmandaError, match="of one tool are merged: rank0 has seen 1, rank1 has flops 2"):
        merge({"rank0": Seen([]), "rank1": FlopsResult([])})
    with pytest.raises(AmandaError, match="no result"):
        merge({})


def measured(rows: int) -> tuple[FlopsTool, StatsTool]:
    torch.manual_seed(rows)
    model, tools = nn.Linear(4, 2), (FlopsTool(), StatsTool())
    with amanda.apply(*tools):
        model(torch.rand(rows, 4)).sum().backward()
    return tools


def test_results_that_are_told_by_other_keys_are_not_merged() -> None:
    flops, stats = (tool.result for tool in measured(3))
    phases, types = flops.by("phase"), flops.by("type")
    for together in (merge, by_rank):
        with pytest.raises(
            AmandaError, match=r"columns.*are merged: a has phase, calls.*; b has type, calls"
        ):
            together({"a": phases, "b": types})
        with pytest.raises(
            AmandaError, match=r"a has phase, type, module, source, calls.*; b has phase, calls"
        ):
            together({"a": flops, "b": phases})
        with pytest.raises(
            AmandaError, match="of one tool are merged: a has flops by rank, b has stats by rank"
        ):
            together({"a": by_rank({"rank0": flops}), "b": by_rank({"rank0": stats})})
        with pytest.raises(AmandaError, match="of one tool are merged: a has flops 2, b has flops by rank"):
            together({"a": flops, "b": by_rank({"rank0": flops})})
        with pytest.raises(AmandaError, match=r"same columns.*: a has x, y; b has y, x"):
            together({name: Table("ours", 1, [Column(key) for key in order], [])
                      for name, order in (("a", "xy"), ("b", "yx"))})  # fmt: skip
        with pytest.raises(AmandaError, match=r"a has x, y \(sum\); b has x, y \(max\)"):
            together({"a": Table("ours", 1, [Column("x"), Column("y", merge="sum")], []),
                      "b": Table("ours", 1, [Column("x"), Column("y", merge="max")], [])})  # fmt: skip
    assert len(merge({"a": phases, "b": flops.by("phase")}).rows()) == 2
    assert len(by_rank({"a": phases, "b": flops.by("phase")}).rows()) == 4


def test_ranks_of_several_programs_stay_apart() -> None:
    ranked = by_rank({"rank0": measured(3)[0].result.by("phase"), "main": measured(4)[0].result.by("phase")})
    for both in (merge({"host0": ranked, "rank1": ranked}), by_rank({"host0": ranked, "rank1": ranked})):
        names = [column.name for column in both.columns]
        assert len(set(names)) == len(names)
        assert list(dict.fromkeys(row[0] for row in both.rows())) == [
            "host0.rank0", "host0.main", "rank1.rank0", "rank1.main",
        ]  # fmt: skip
        assert both._facts()["of"] == "flops"
    again = by_rank({"site": both})
    assert again.rows()[0][0] == "site.host0.rank0"


def test_a_result_of_a_tool_and_a_table_of_it_keep_all_rows() -> None:
    flops = measured(3)[0].result
    table = Table.of(json.loads(flops.to_json()))
    assert len(merge({"a": flops, "b": table}).rows()) == 2 * len(flops.rows())


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


def test_the_lead_of_a_result_without_a_class_is_that_of_its_table(tmp_path: Path) -> None:
    results = {"rank0": Seen([("relu", 2, 1.0, 5.0)]), "rank1": Seen([("relu", 3, 0.5, 4.0)])}
    results["rank0"].lead = "Of step 4 alone."
    tables = {name: load(seen.save(tmp_path / f"{name}.json")) for name, seen in results.items()}
    table = tables["rank0"]
    assert isinstance(table, Table)
    assert table.to_dict() == results["rank0"].to_dict()
    assert (table.lead, list(table.notes())) == ("Of step 4 alone.", ["Of ops.", "All is well."])
    assert str(table).splitlines()[1] == "Of step 4 alone."
    for merged in (merge(results), merge(tables), by_rank(tables), merge({"both": merge(tables)})):
        assert merged.lead == "rank0: Of step 4 alone."
        assert str(merged).count("Of step 4 alone.") == 1


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
    output = capsys.readouterr().out
    assert "Of rank0 and rank2 together." in output
    assert "There is no result of rank1 and rank3." in output
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
    assert command([str(tmp_path)]) == 1
    assert "has no results of processes, such as rank0.flops.json" in capsys.readouterr().err
    assert command([str(tmp_path / "absent.json")]) == 1
    assert "absent.json cannot be read: No such file or directory\n" in capsys.readouterr().err
    path = tmp_path / "rank0.flops.json"
    for text, why in (
        ("", "it is no JSON (Expecting value: line 1 column 1 (char 0))"),
        ("[1]", "it holds no object with a schema"),
        ("{}", "it names no schema, as what a result's save() writes does"),
        ('{"schema": "other.flops"}', "its schema is 'other.flops'; expected one that begins with 'amanda.'"),
        (
            '{"schema": "amanda.flops", "version": 9}',
            "versions 1 to 2 are read here; it is newer: update the distrib",
        ),
        ('{"schema": "amanda.flops", "version": 2}', "it lacks 'places'"),
    ):
        path.write_text(text)
        assert command([str(path)]) == 1
        stderr = capsys.readouterr().err
        assert stderr.startswith(f"amanda merge: {path} is no file of a result that can be read: ")
        assert why in stderr
    assert command([str(path), "--ranks", "0"]) == 2
    assert "'--ranks': 0 is not in the range" in capsys.readouterr().err


def test_a_file_may_be_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "flops.json.gz"
    path.write_bytes(gzip.compress(json.dumps(FlopsResult([]).to_dict()).encode()))
    assert isinstance(load(path), FlopsResult)


def test_gathering_without_a_process_group_is_an_error() -> None:
    with pytest.raises(
        AmandaError, match=r"there is no process group: torch\.distributed\.init_process_group"
    ):
        gather(Seen([]))
