"""The page of `amanda view`, without a browser: what is read, joined and embedded."""

from __future__ import annotations

import gzip
import json
import re
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import children
import pytest
from made_trace import flops_of, transformer

import amanda
from amanda.errors import AmandaError
from amanda.tools.results import Column, Result
from amanda.tools.view import main, to_page

KEYS = ("phase", "type", "module", "source")


def saved(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps(content))
    return path


def table(rows: list[dict[str, Any]], schema: str = "amanda.cost", **more: Any) -> dict[str, Any]:
    return {"schema": schema, "version": 1, "rows": rows, **more}


def row(type_: str, line: int, **values: Any) -> dict[str, Any]:
    return {**dict(zip(KEYS, ("forward", type_, "net", f"a.py:{line}"), strict=True)), **values}


def embedded(page: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    content: dict[str, Any] = json.loads(data)
    return content


def shown(folder: Path, *contents: Any) -> dict[str, Any]:
    return embedded(to_page(*(saved(folder, f"{i}.json", content) for i, content in enumerate(contents))))


@pytest.fixture
def trace() -> dict[str, Any]:
    return transformer(layers=1)


def test_a_page_stands_alone_and_is_small(tmp_path: Path) -> None:
    page = to_page(saved(tmp_path, "a.json", table([row("relu", 1)])))
    assert len(page) < 300_000
    links = re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)""", page.partition("<body>")[0])
    assert [link for link in links if not link.startswith("#")] == ["data:,"]  # but places in the page
    assert "sourceMappingURL" not in page
    assert "default-src 'none'" in page
    assert "Permission is hereby granted" in page  # the licence of what is vendored


def palettes(page: str) -> list[dict[str, str]]:
    """Return the colours of a page: light, dark as the system wants, dark by the button."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    blocks = re.findall(r":root[^{]*{([^}]*--back[^}]*)}", style)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", block)) for block in blocks]


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(color: str, background: str) -> float:
    """Return the contrast of two colours.  Source: WCAG 2.2, "contrast ratio"."""
    dark, light = sorted(map(luminance, (color, background)))
    return (light + 0.05) / (dark + 0.05)


def test_colours_have_the_contrast_that_wcag_aa_wants(tmp_path: Path) -> None:
    light, dark, selected = palettes(to_page(saved(tmp_path, "a.json", table([row("relu", 1)]))))
    assert dark == selected
    assert set(dark) == set(light)
    rows = ("panel", "raised", "select", "hover")
    for colours in (light, dark):
        kinds = [name for name in colours if name.startswith("k-")]
        pairs = [
            *((4.5, text, on) for text in ("text", "soft") for on in (*rows, "back", "found", "node")),
            *((4.5, text, on) for text in ("accent", "k-loss") for on in rows),
            *((4.5, "on-kind", kind) for kind in kinds),
            *((3, kind, on) for kind in kinds for on in (*rows, "node", "found")),
            (3, "edge", "raised"), (3, "edge", "cluster"), (3, "plot", "panel"),
        ]  # fmt: skip
        assert [pair for pair in pairs if contrast(colours[pair[1]], colours[pair[2]]) < pair[0]] == []


def test_names_are_data_in_the_page(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><!--\u2028\ud800"
    page = to_page(saved(tmp_path, "a.json", table([row(name, 1)])), title="<b>&")
    assert page.count("<script") == 3
    assert "<title>&lt;b&gt;&amp;</title>" in page
    assert "\u2028" not in page
    page.encode()
    assert embedded(page)["ops"]["type"] == [name]


def test_numbers_that_json_has_not_become_words(tmp_path: Path) -> None:
    rows = [row("a", 1, x=float("nan")), row("b", 2, x=float("inf")), row("c", 3, x=-float("inf"))]
    (table_content,) = shown(tmp_path, table(rows))["tables"]
    assert [cells[-1] for cells in table_content["rows"]] == ["NaN", "Infinity", "-Infinity"]
    assert table_content["columns"][-1]["number"]


def test_a_result_needs_no_file() -> None:
    class Calls(Result):
        name, title = "calls", "Calls"
        columns = (*map(Column, KEYS), Column("calls", total=True), Column("time", unit="s"))

        def rows(self) -> Sequence[Sequence[Any]]:
            return [("forward", "relu", "", "a.py:1", 3, 0.5)]

        def notes(self) -> Sequence[str]:
            return ["A note."]

    content = embedded(to_page(Calls()))
    assert content["title"] == "calls"
    assert content["tables"][0]["title"] == "Calls"
    assert content["notes"] == ["A note."]
    assert content["tables"][0]["columns"][-2:] == [
        {"name": "calls", "number": True, "total": True, "unit": ""},
        {"name": "time", "number": True, "total": False, "unit": "s"},
    ]


def test_a_trace_has_its_ops_tensors_and_edges(tmp_path: Path, trace: dict[str, Any]) -> None:
    content = shown(tmp_path, trace)
    assert content["ops"]["type"] == [op["type"] for op in trace["ops"]]
    assert content["graph"]["tensors"]["shape"] == [tensor["shape"] for tensor in trace["tensors"]]
    edges = list(zip(*(content["graph"]["edges"][i::3] for i in range(3)), strict=True))
    assert edges
    for producer, consumer, tensor in edges:
        tensor_of_trace = trace["tensors"][tensor]
        assert consumer in tensor_of_trace["consumers"]
        assert producer == (-1 if tensor_of_trace["producer"] is None else tensor_of_trace["producer"])
    parameters = {tensor["index"] for tensor in trace["tensors"] if tensor["kind"] == "parameter"}
    assert not parameters & {edge[2] for edge in edges}


def test_tables_find_the_ops_of_a_trace(tmp_path: Path, trace: dict[str, Any]) -> None:
    content = shown(tmp_path, trace, flops_of(trace))
    (rows,) = (page_table["ops"] for page_table in content["tables"])
    assert rows == [[op] for op in range(len(trace["ops"]))]


def test_an_id_goes_before_the_place(tmp_path: Path, trace: dict[str, Any]) -> None:
    last = {**trace["ops"][-1], "source": "elsewhere.py:1"}
    (page_table,) = shown(tmp_path, trace, table([last]))["tables"]
    assert page_table["ops"] == [[len(trace["ops"]) - 1]]


def test_one_row_stands_for_all_ops_of_its_place_and_as_many_rows_are_theirs_in_turn(tmp_path: Path) -> None:
    ops = [row("add", 1), row("add", 1), row("mul", 1)]
    trace = {"schema": "amanda.trace", "version": 1, "ops": ops, "tensors": []}
    first, second = shown(tmp_path, trace, table(ops[1:]), table(ops))["tables"]
    assert first["ops"] == [[0, 1], [2]]
    assert second["ops"] == [[0], [1], [2]]


def test_rows_that_words_tell_apart_are_each_about_all_ops_of_their_place(tmp_path: Path) -> None:
    ops = [row("add", 1), row("add", 1)]
    trace = {"schema": "amanda.trace", "version": 1, "ops": ops, "tensors": []}
    (page_table,) = shown(tmp_path, trace, table([row("add", 1, tensor="a"), row("add", 1, tensor="b")]))[
        "tables"
    ]
    assert page_table["ops"] == [[0, 1], [0, 1]]


def test_without_a_trace_tables_name_the_ops(tmp_path: Path) -> None:
    costs = table([row("add", 1), row("add", 1), row("mul", 2)])
    times = table([row("mul", 2), row("relu", 3), row("add", 1)], schema="amanda.times")
    content = shown(tmp_path, costs, times)
    assert content["ops"]["type"] == ["add", "mul", "relu"]
    assert [page_table["ops"] for page_table in content["tables"]] == [[[0], [0], [1]], [[1], [2], [0]]]
    assert content["graph"] is None


def test_a_table_that_is_not_about_ops_stays_a_table(tmp_path: Path) -> None:
    content = shown(tmp_path, table([{"module": "layer1", "calls": 3}]))
    assert content["tables"][0]["ops"] is None
    assert content["ops"]["type"] == []


def test_columns_that_only_some_rows_have_numbers_in_are_words(tmp_path: Path) -> None:
    (page_table,) = shown(tmp_path, table([row("a", 1, x=1, y=None), row("b", 2, x="?", y=2.5)]))["tables"]
    assert {column["name"]: column["number"] for column in page_table["columns"]} == {
        **dict.fromkeys(KEYS, False), "x": False, "y": True,
    }  # fmt: skip


def test_words_for_numbers_are_numbers(tmp_path: Path) -> None:
    (page_table,) = shown(tmp_path, table([row("a", 1, x="inf"), row("b", 2, x=0.5)]))["tables"]
    assert page_table["columns"][-1]["number"]
    assert [cells[-1] for cells in page_table["rows"]] == ["Infinity", 0.5]


def test_tools_of_one_scope_tell_of_the_same_ops() -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace, flops, profile = (amanda.load_tool(name) for name in ("trace", "flops", "profile"))
    with amanda.apply(trace, flops, profile):
        for _ in range(2):
            model(torch.rand(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    content = embedded(to_page(trace.result, flops.result, profile.result))
    ops = content["ops"]
    assert len(content["tables"]) == 2
    for page_table in content["tables"]:
        for cells, about in zip(page_table["rows"], page_table["ops"], strict=True):
            assert {(ops["type"][op], ops["module"][op], ops["source"][op]) for op in about} == {
                tuple(cells[1:4])
            }


def test_a_diff_has_what_its_view_draws(tmp_path: Path) -> None:
    import torch
    from torch import nn

    from amanda.tools.diff import diff

    model, x = nn.Linear(4, 2), torch.rand(3, 4)
    result = diff(lambda: model(x).relu(), lambda: model(x * 2).relu())
    (page_table,) = embedded(to_page(result.save(tmp_path / "diff.json")))["tables"]
    assert page_table["schema"] == "amanda.diff"
    names = [column["name"] for column in page_table["columns"]]
    numbers = {column["name"] for column in page_table["columns"] if column["number"]}
    assert {"phase", "type", "module", "verdict"} <= set(names)
    assert {"relative error", "tolerance"} <= numbers
    assert page_table["rows"][page_table["first"]["forward"]][names.index("verdict")] == "different"


TOOLS = [tool.name for tool in amanda.list_tools() if tool.distribution == "amanda-tools"]


NEEDED: dict[str, Any] = {"quantize": {"method": "dynamic"}, "patch": {"module": "0"}}
"""Options that a tool cannot do without."""


@pytest.mark.parametrize("name", [name for name in TOOLS if "mapping" not in name])
def test_what_any_tool_tells_can_be_shown(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where some write by default
    import torch
    from torch import nn

    tool = amanda.load_tool(name, **NEEDED.get(name, {}))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with amanda.apply(tool):
        model(torch.rand(3, 4) / torch.tensor(0.0)).sum().backward()
    path = tool.result.save(tmp_path / f"{name}.json")
    content = embedded(to_page(path))
    assert content["sources"][0]["schema"].startswith("amanda.")
    assert content["tables"] or content["graph"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"x\.json is no file of a result that can be read: it is no JSON \("),
        ("3", r"x\.json is .*: it holds no object with a schema"),
        ('{"schema": "other"}', r"its schema is 'other'; expected one that begins with 'amanda\.'"),
        ('{"rows": []}', r"it names no schema, as what a result's save"),
        ('{"schema": "amanda.trace", "version": "1"}', r"it is version '1' of amanda\.trace"),
        ('{"schema": "amanda.trace", "version": 99}', r"version 99 of amanda\.trace, .*update the dist"),
        ('{"schema": "amanda.cost", "version": 1, "rows": 3}', r"x\.json: `rows` is to be a list of objects"),
        ('{"schema": "amanda.trace", "version": 1, "ops": [], "tensors": [{"consumers": [4]}]}',
         r"x\.json: tensor 0 names op 4, but the ops are numbered 0 to -1"),
        ('[{"ph": "X", "name": "a", "ts": 1}]', r"x\.json is a Chrome trace; open it in https://ui\.perf"),
        ('{"traceEvents": []}', r'is a Chrome trace; .* saved as "profile\.json" has the times'),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(AmandaError, match=message):
        to_page(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(AmandaError, match=r"absent\.json cannot be read: No such file"):
        to_page(tmp_path / "absent.json")
    (tmp_path / "cut.json").write_bytes(gzip.compress(b"{}" * 99)[:20])
    with pytest.raises(AmandaError, match=r"cut\.json is .* a gzip file that ends too early"):
        to_page(tmp_path / "cut.json")
    with pytest.raises(AmandaError, match="one result or more"):
        to_page()


def test_the_command_writes_a_page_and_says_where(tmp_path: Path, trace: dict[str, Any]) -> None:
    saved(tmp_path, "net.json", trace)
    command = [sys.executable, "-m", "amanda", "view", "net.json"]
    done = children.run(command, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "net.view.html\n", "")
    assert embedded((tmp_path / "net.view.html").read_text())["title"] == "net.json"
    failed = children.run([*command, "absent.json"], cwd=tmp_path)
    assert failed.returncode == 1
    assert "amanda view: absent.json cannot be read: No such file" in failed.stderr


def test_a_folder_stands_for_the_json_files_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "res"
    folder.mkdir()
    with pytest.raises(AmandaError, match=r"res is a folder without \.json files, as `amanda run -o` makes"):
        to_page(folder)
    for name in ("b.json", "a.json"):
        saved(folder, name, table([row("relu", 1)]))
    (folder / "a.csv").touch()
    monkeypatch.chdir(folder)
    assert main([".", "-o", "page.html"]) == 0
    assert [source["name"] for source in embedded(Path("page.html").read_text())["sources"]] == [
        "a.json",
        "b.json",
    ]
    monkeypatch.chdir(tmp_path)
    assert main(["res"]) == 0
    assert capsys.readouterr().out == "page.html\nres.view.html\n"


def test_the_page_is_written_where_wanted_and_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    file, page = saved(tmp_path, "a.json", table([row("relu", 1)])), tmp_path / "b.html"
    assert main([str(file), "--output", str(page), "--title", "Mine", "--open"]) == 0
    assert opened == [page.as_uri()]
    assert "<title>Mine</title>" in page.read_text()
    assert capsys.readouterr().out == f"{page}\n"
    for name, why in (("absent/b.html", "there is no folder"), ("b.pdf", "ends in none of .html, .htm")):
        assert main([str(file), "-o", str(tmp_path / name)]) == 2
        assert why in capsys.readouterr().err
