"""Results: tables for people, data frames and files for programs."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from amanda.errors import AmandaError
from amanda.tools.results import Column, Result, amount, check_schema, count_of, shortened
from amanda.tools.results._layout import TableLayout, _cell_text, shortened_texts


class Calls(Result):
    name = "calls"
    columns = (Column("op"), Column("calls", total=True), Column("FLOPs", show=amount, total=True))
    title = "Calls"

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self._rows = rows

    def rows(self) -> Sequence[Sequence[Any]]:
        return self._rows

    def notes(self) -> Sequence[str]:
        return ["Two <notes>."]


@pytest.fixture
def calls() -> Calls:
    return Calls([("conv2d [x]", 53, 8_000_000_000), ("<relu>", 49, None)])


def test_it_prints_as_a_table_with_totals_and_notes(calls: Calls) -> None:
    lines = [line.split() for line in str(calls).splitlines() if line.strip()]
    assert lines[0] == ["Calls"]
    assert ["conv2d", "[x]", "53", "8", "G"] in lines
    assert ["<relu>", "49"] in lines
    assert ["total", "102", "8", "G"] in lines
    assert lines[-1] == ["Two", "<notes>."]


def test_a_long_table_is_cut_but_its_totals_are_of_all() -> None:
    text = str(Calls([("op", 1, 1)] * 100))
    assert "Showing 15 of 100 rows. Show everything: --full (shell)" in text
    assert ["total", "100", "100"] in [line.split() for line in text.splitlines()]
    assert "Showing 7 of 100 rows." in Calls([("op", 1, 1)] * 100).table(top=7)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_rows_with_nan_come_last_where_a_column_sorts(order: Sequence[int]) -> None:
    rows = [("low", 1.0, 1), ("nan", math.nan, 1), ("high", 3.0, 1), ("negative", -2.0, 1)]
    text = Calls([rows[i] for i in order]).table(sort="calls")
    names = [line.split()[0] for line in text.splitlines() if line.endswith(" 1")]
    assert names == ["high", "low", "negative", "nan"]


def test_rows_are_reached_by_index_as_by_iteration(calls: Calls) -> None:
    rows = list(calls)
    assert len(calls) == len(rows) > 1
    assert (calls[0], calls[-1], calls[:2]) == (rows[0], rows[-1], rows[:2])
    empty = Calls([])
    assert empty  # a result is true, whatever its rows
    assert len(empty) == 0
    assert repr(empty) == "Calls: No op was recorded"


class Wide(Result):
    name = "wide"
    columns = (Column("path"), Column("kind", shown=False), Column("count", number=True))

    def rows(self) -> Sequence[Sequence[Any]]:
        return [("a/" * 200, "hidden", 1_234_567)]


def test_numbers_stay_whole_and_some_columns_are_for_files_alone() -> None:
    assert "1234567" in str(Wide())
    assert "hidden" not in str(Wide())
    assert Wide().to_csv().splitlines()[1].endswith(",hidden,1234567")
    assert "hidden" in Wide().to_html()


def test_it_shows_in_a_notebook_with_names_escaped(calls: Calls) -> None:
    html = calls._repr_html_()
    assert "&lt;relu&gt;" in html
    assert "Two &lt;notes&gt;." in html
    assert "<relu>" not in html


def test_in_a_notebook_numbers_are_aligned_and_short_paths_tell_all() -> None:
    class Paths(Calls):
        columns = (Column("op"), Column("calls", total=True), Column("path", show=lambda path: path[-4:]))

    html = Paths([("relu", 49, '/a/"b".py')])._repr_html_()
    assert '<th scope="col" class="number">calls</th>' in html
    assert '<td class="number">49</td>' in html
    assert '<td title="/a/&quot;b&quot;.py">&quot;.py</td>' in html
    assert '<th class="number">49</th>' in html


def test_it_goes_to_pandas(calls: Calls) -> None:
    import pandas

    frame = calls.to_pandas()
    assert list(frame.columns) == ["op", "calls", "FLOPs"]
    assert frame["calls"].sum() == 102
    assert pandas.isna(frame["FLOPs"][1])


def test_files_hold_the_values(calls: Calls, tmp_path: Path) -> None:
    content = json.loads(calls.save(tmp_path / "calls.json").read_text())
    assert (content["schema"], content["version"]) == ("amanda.calls", 1)
    assert content["rows"][0] == {"op": "conv2d [x]", "calls": 53, "FLOPs": 8_000_000_000}
    assert content["columns"][2] == {"name": "FLOPs", "total": True, "unit": ""}
    assert (content["title"], content["notes"]) == ("Calls", ["Two <notes>."])
    rows = list(csv.reader(calls.save(tmp_path / "calls.csv").read_text().splitlines()))
    assert rows == [["op", "calls", "FLOPs"], ["conv2d [x]", "53", "8000000000"], ["<relu>", "49", ""]]
    assert calls.save(tmp_path / "calls.html").read_text().startswith("<!doctype html>")
    assert calls.save(tmp_path / "calls.txt").read_text() == f"{calls.whole()}\n"


def test_a_suffix_of_no_form_is_refused_and_nothing_written(calls: Calls, tmp_path: Path) -> None:
    with pytest.raises(AmandaError, match=r"calls\.xlsx has no suffix .*: \.csv, \.html, \.json, \.txt"):
        calls.save(tmp_path / "calls.xlsx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (17, "17"), (999, "999"), (1000, "1 k"), (4_089_184_256, "4.089 G"), (-2500, "-2.5 k"),
     (999_960, "1 M"), (0.25, "0.25")],
)  # fmt: skip
def test_amounts_have_four_digits_and_a_prefix(value: float, text: str) -> None:
    assert amount(value) == text


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("/a/long/path/model.py:12", 14, "…/model.py:12"),
        ("/a/long/path/model.py:12", 12, "…model.py:12"),
        ("model.layers.31.mlp.down_proj", 17, "…31.mlp.down_proj"),
        ("model.layers.31.mlp.down_proj", 16, "…mlp.down_proj"),
        ("model.layers.31.a_module_of_a_long_name", 12, "…a_long_name"),
        ("scaled_dot_product_attention_backward", 24, "scaled_dot_pro…_backward"),
        ("scaled_dot_product_attention", 17, "scaled_d…ttention"),
        ("f32[64,3,7,7] f32[64] f32[64]", 20, "f32[64,3,7,7] …"),
        ("model.py:12", 12, "model.py:12"),
    ],
)
def test_a_long_text_keeps_what_tells_it_from_others(text: str, width: int, short: str) -> None:
    assert shortened(text, width) == short
    assert len(short) <= width


def test_paths_with_the_same_end_keep_their_beginning_too() -> None:
    paths = ["encoder.layers.0.mlp.up", "decoder.layers.0.mlp.up", "head"]
    assert shortened_texts(paths, 16) == ["encoder…0.mlp.up", "decoder…0.mlp.up", "head"]


class Broad(Result):
    name = "broad"
    title = "Broad"
    columns = (
        Column("type"), Column("module"), Column("source"), Column("calls", total=True),
        Column("bytes", total=True),
    )  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        return [("conv2d", "layer4.2.conv3", "/home/somebody/program/train.py:120", 53, 123456789)]


@pytest.mark.parametrize(
    ("width", "texts"),
    [
        (120, ["layer4.2.conv3", "/home/somebody/program/train.py:120", "123456789"]),
        (77, ["layer4.2.conv3", "/home/somebody/program/train.py:120", "123456789"]),
        (50, ["layer4.2.conv3", "123456789", "Hidden columns: source."]),
        (30, ["layer4.2.conv3", "Hidden columns: bytes, source."]),
    ],
)
def test_a_terminal_gets_what_it_has_room_for(width: int, texts: list[str]) -> None:
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(Broad())
    printed = " ".join(text.getvalue().split())
    assert all(part in printed for part in texts), text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= width


def test_the_whole_text_keeps_each_row_in_a_line_however_wide() -> None:
    class Broader(Broad):
        def rows(self) -> Sequence[Sequence[Any]]:
            return [("x" * 100, "y" * 100, "z" * 100, 1, 2)]

    (row,) = [line for line in Broader().whole().splitlines() if "xxx" in line]
    assert row.split() == ["x" * 100, "y" * 100, "z" * 100, "1", "2"]


def test_three_columns_stay_and_those_of_high_priority_longest() -> None:
    columns = [
        Column("a"),
        Column("b", priority=1),
        Column("c"),
        Column("d", priority=2),
        Column("e", priority=-1),
    ]
    layout = TableLayout.fitting(columns, [["x" * 50] * 5], [""] * 5, 10)
    assert (layout.positions, layout.hidden) == ([0, 1, 3], ["c", "e"])


class Places(Result):
    """Ops forward and backward: a row for each of the given modules, all of one line."""

    name = "places"
    columns = (
        *map(Column, ("phase", "type", "module", "source")), Column("NaN", number=True),
        Column("calls", number=True),
    )  # fmt: skip

    def __init__(self, *modules: str, phase: str = "forward") -> None:
        self._modules, self._phase = modules, phase

    def rows(self) -> Sequence[Sequence[Any]]:
        source = "/home/somebody/models/of/a/long/path/model.py:12"
        return [
            (self._phase, f"linear{'_backward' * (self._phase == 'backward')}", module, source, 0, i)
            for i, module in enumerate(self._modules)
        ]


def test_a_phase_is_left_out_where_types_tell_it() -> None:
    assert "forward" not in str(Places("a", "b"))
    assert "phase" not in str(Places("a", "b", phase="backward"))
    assert "recomputation" in str(Places("a", "b", phase="recomputation"))


def test_what_repeats_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "48")
    modules = [f"model.language_model.layers.{i}.self_attention.{name}" for i in (0, 1) for name in "qkv"]
    lines = str(Places(*modules)).splitlines()
    assert max(map(len, lines)) <= 48
    assert words("\n".join(lines))[2:5] == [
        ["linear", f"…0.self_attention.{name}", str(i)] for i, name in enumerate("qkv")
    ]
    said = " ".join(lines)
    assert '"…" stands for "model.language_model.layers.".' in said
    assert "In every row: NaN 0." in said
    assert "Hidden columns: source." in said


def test_one_is_no_plural() -> None:
    assert [count_of(number, "op") for number in (0, 1, 4089)] == ["0 ops", "1 op", "4,089 ops"]


def test_rows_are_sorted_and_combined_as_asked() -> None:
    layers = Layers(4)
    by_mean = [line[1] for line in words(layers.table(sort="mean"))[4:7]]
    assert by_mean == ["lm_head", "model.layers.3.up", "model.layers.3.down"]
    assert [line[:3] for line in words(layers.table(depth=2))[4:7]] == [
        ["linear", "lm_head", "1"], ["up", "model.layers", "4"], ["down", "model.layers", "4"],
    ]  # fmt: skip
    with pytest.raises(AmandaError, match=r"^layers has no column 'call'; did you mean calls"):
        layers.table(sort="call")


def test_rows_have_names() -> None:
    rows = list(Layers(1))
    assert [(row.type, row.module, row.ms) for row in rows][1] == ("up", "model.layers.0.up", 0)
    assert repr(Layers(1)) == "Layers: The answer"
    assert repr(Broad()) == "Broad: 1 row"


def test_an_empty_table_is_not_printed() -> None:
    assert str(Calls([])).split("\n") == ["Calls", "Two <notes>."]


class Layers(Result):
    """Two ops of each of so many layers, and one of the head; times differ."""

    name, title, _order = "layers", "Layers", "ms"
    _leading = 1
    columns = (
        Column("type"), Column("module"), Column("calls", total=True), Column("ms", total=True),
        Column("mean", number=True, folded="mean"), Column("share", number=True, folded="sum"),
        Column("sparsity", number=True),
    )  # fmt: skip

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def rows(self) -> Sequence[Sequence[Any]]:
        found = [
            (kind, f"model.layers.{i}.{kind}", 1, i, i, 1, i % 3)
            for kind in ("up", "down")
            for i in range(self._layers)
        ]
        return [("linear", "lm_head", 1, 100, 100, 10, None), *found]

    def notes(self) -> Sequence[str]:
        return ["The answer.", "A convention."]


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_repeated_layers_are_one_row_where_a_table_is_long() -> None:
    lines = words(str(Layers(32)))
    assert lines[0] == ["Layers"]
    assert lines[1] == ["The", "answer."]
    assert lines[4:7] == [  # in the order of the sums
        ["up", "model.layers.0-31.up", "32", "496", "15.5", "32", "0", "to", "2"],
        ["down", "model.layers.0-31.down", "32", "496", "15.5", "32", "0", "to", "2"],
        ["linear", "lm_head", "1", "100", "100", "10"],
    ]
    assert lines[7] == ["total", "65", "1092"]
    assert " ".join(lines[8]).startswith("Showing 3 rows (repeated layers combined). Show everything: --full")
    assert lines[-1] == ["A", "convention."]


def test_equal_rows_of_one_module_are_not_repeated_layers() -> None:
    class Twice(Layers):
        def rows(self) -> Sequence[Sequence[Any]]:
            return [row for row in super().rows() for _ in range(2)]

    lines = words(str(Twice(32)))
    assert [row[1] for row in lines[4:10]] == [
        "model.layers.0-31.up", "model.layers.0-31.up", "model.layers.0-31.down", "model.layers.0-31.down",
        "lm_head", "lm_head",
    ]  # fmt: skip


def test_no_cell_is_wrapped_however_long_a_number_is() -> None:
    class Long(Result):
        name = "long"
        columns = (Column("type"), Column("module"), Column("digits", number=True))

        def rows(self) -> Sequence[Sequence[Any]]:
            return [("scaled_dot_product_attention", "encoder.layer.11.attention.self", 10**24)] * 3

    text = StringIO()
    Console(file=text, width=64, color_system=None).print(Long())
    assert [len(row) for row in words(text.getvalue())[2:5]] == [3, 3, 3]
    assert max(map(len, text.getvalue().splitlines())) <= 64


def test_a_short_table_keeps_its_rows_and_so_do_files(tmp_path: Path) -> None:
    assert "combined" not in str(Layers(7))
    assert ["up", "model.layers.3.up", "1", "3", "3", "1", "0"] in words(str(Layers(7)))
    whole = Layers(32).whole()
    assert len(words(whole)) == len(words(str(Layers(7)))) + 2 * 25
    assert Layers(32).save(tmp_path / "all.txt").read_text() == f"{whole}\n"
    assert len(Layers(32).to_pandas()) == 65


def test_a_page_has_the_answer_first() -> None:
    html = Layers(1).to_html()
    assert html.index("The answer.") < html.index("<table>") < html.index("A convention.")


def test_text_is_as_wide_as_the_terminal_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, str(Broad()).splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "50")
    text = str(Broad())
    assert max(map(len, text.splitlines())) <= 50
    assert "Hidden columns: source." in " ".join(text.split())
    assert "/home/somebody/program/train.py:120" in Broad().whole()


def test_text_is_returned_in_notebooks_too(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert words(str(calls))[0] == ["Calls"]


@pytest.mark.parametrize(
    ("paths", "path"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], "a.0-2.b"),
        (["a.7.b", "a.0.b", "a.1.b", "a.0.b"], "a.0-1,7.b"),
        (["0", "1"], "0-1"),
        (["layer1.0.conv1", "layer1.2.conv1"], "layer1.0,2.conv1"),
        (["", ""], ""),
        (["a.0.b.1", "a.1.b.1"], "a.0-1.b.1"),
    ],
)
def test_indices_of_a_path_are_ranges(paths: list[str], path: str) -> None:
    assert _cell_text(Column("module"), paths) == path


def test_older_versions_are_read_and_newer_ones_name_the_distribution() -> None:
    def content(version: object) -> dict[str, object]:
        return {"schema": "amanda.calls", "version": version}

    assert [check_schema(content(version), "calls", 3) for version in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(
        ValueError, match=r"versions 1 to 3 are read here; it is newer: update .*amanda-tools"
    ):
        check_schema(content(4), "calls", 3)
    with pytest.raises(ValueError, match=r"version 1 of amanda\.calls, and versions 2 to 3 are read here$"):
        check_schema(content(1), "calls", 3, oldest=2)
    for other in (0, True, "1", 1.0, None):
        with pytest.raises(ValueError, match=r"version 1 is read here$"):
            check_schema(content(other), "calls", 1)
