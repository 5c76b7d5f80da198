"""Every session of nox that is named anywhere is there."""

from __future__ import annotations

import ast
import re

from amanda_docs.pages import ROOT

TREE = ast.parse((ROOT / "noxfile.py").read_text())
SESSIONS = {
    node.name
    for node in TREE.body
    if isinstance(node, ast.FunctionDef)
    and any(ast.unparse(one).startswith("nox.session") for one in node.decorator_list)
}
NAMED = re.compile(r"nox -s ((?:\w+ ?)+)")


def test_the_noxfile_lists_its_sessions() -> None:
    listed = re.search(r"Sessions: ([\w\s,]+)\.", ast.get_docstring(TREE) or "")
    assert listed is not None
    assert {name.strip() for name in listed[1].split(",")} == SESSIONS


def test_the_table_of_commands_has_every_session() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    first_cells = re.findall(r"^\| `([\w ]+)` \| .+ \| .+ \|$", page, re.MULTILINE)
    named = [name for cell in first_cells for name in cell.split()]
    assert sorted(named) == sorted(SESSIONS)


def test_sessions_that_texts_name_are_there() -> None:
    folders = (".ci", ".github", "docs", "packages", "templates", "tests")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path for path in texts if path.suffix in (".md", ".py", ".yml", ".toml") or path.name == "run"]
    named = [
        (path.name, found[1].split()[0])
        for path in (*texts, *ROOT.glob("*.md"), ROOT / "pyproject.toml")
        for found in NAMED.finditer(path.read_text())
    ]
    assert len(named) > 10
    assert [one for one in named if one[1] not in SESSIONS] == []
