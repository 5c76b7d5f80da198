"""What `nox -s docs` makes the site of: the navigation, the links, the reference, the limitations."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from amanda import AmandaError
from amanda.testing._ladder import CAPABILITIES, member_summary
from amanda.testing._suite import RUNGS
from amanda_docs import drivers
from amanda_docs.checks import problems, undocumented
from amanda_docs.fields import as_markdown
from amanda_docs.gaps import capabilities, gaps_table, meanings, suites
from amanda_docs.navigation import unlisted
from amanda_docs.pages import DOCS, LINK, ROOT, relinked

PUBLIC = ["amanda", "amanda.drivers.torch", "amanda.drivers.tensorflow"]
DRIVERS = sorted(ROOT.glob("packages/*/src/amanda/drivers/*/__init__.py"))
IN_WHOLE = [
    "amanda.plugins",
    "amanda.backend",
    "amanda.interceptor",
    "amanda.testing",
    "amanda.errors",
    "amanda.options",
]
TOOLS = sorted(
    f"amanda.tools.{path.parent.name}"
    for path in ROOT.glob("packages/*/src/amanda/tools/[!_]*/__init__.py")
    if path.parent.name != "libraries"  # whose names are other projects', and are documented by them
)


def test_every_page_is_in_the_navigation() -> None:
    assert unlisted() == [], "\n".join(unlisted())


@pytest.mark.parametrize("page", sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")))
def test_links_of_a_page_lead_to_files(page: str) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = {target.partition("#")[0] for target in LINK.findall(text)} - {""}
    assert [one for one in targets if not ((DOCS / page).parent / one).exists()] == []


def test_the_page_of_a_tool_says_which_distribution_to_install() -> None:
    folders = {path.name: path.parts[-5] for path in ROOT.glob("packages/*/src/amanda/tools/[!_]*")}
    for page in DOCS.glob("tools/*.md"):
        distribution = folders[page.stem.partition("-")[0]]
        assert f"\n\nIn [{distribution}](../install.md#the-distributions).\n" in page.read_text(), page


@pytest.mark.parametrize("package", PUBLIC + IN_WHOLE + TOOLS)
def test_every_public_name_is_in_the_reference_and_has_a_docstring(package: str) -> None:
    listed = "".join(page.read_text() for page in (DOCS / "reference").rglob("*.md"))
    page = DOCS / "tools" / f"{package.rpartition('.')[2]}.md"
    whole = f"::: {package}\n" in listed or (package in TOOLS and page.exists())
    module = importlib.import_module(package)
    assert module.__doc__
    for name in module.__all__:
        value = getattr(module, name)
        assert whole or re.search(rf"^::: {package}\.(\w+\.)?{name}$", listed, re.MULTILINE), name
        if inspect.isclass(value) or inspect.isroutine(value):
            assert inspect.getdoc(value), name
        elif not inspect.ismodule(value):
            assert described(module, name), f"{package}.{name} has no text below it, and is not in the site"


def described(module: ModuleType, name: str) -> bool:
    """Whether a string follows the assignment of a name, in this module or in the one that it comes from."""
    tree = ast.parse(inspect.getsource(module))
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
    for node, after in [pair for body in blocks for pair in zip(body, [*body[1:], None], strict=True)]:
        if isinstance(node, ast.ImportFrom) and not node.level:
            for one in node.names:
                if (one.asname or one.name) == name:
                    return described(importlib.import_module(str(node.module)), one.name)
                source = importlib.import_module(str(node.module)) if one.name == "*" else None
                if source is not None and hasattr(source, name) and described(source, name):
                    return True
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(ast.unparse, targets):
                return isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    return False


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda path: path.parent.name)
def test_the_public_names_of_every_driver_are_in_the_reference(driver: Path) -> None:
    """Read from source: not every framework is installed here."""
    listed = (DOCS / "reference" / "drivers.md").read_text()
    package = f"amanda.drivers.{driver.parent.name}"
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(driver.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    for name in names:
        missing = f"docs/reference/drivers.md has no line `::: {package}.{name}`"
        assert re.search(rf"^::: {package}\.(\w+\.)?{name}$", listed, re.MULTILINE), missing


def test_each_gap_of_a_suite_is_in_the_table_of_limitations() -> None:
    table = gaps_table()
    found = suites()
    assert len(found) >= 4
    for suite in found:
        assert suite.title in table.splitlines()[0]
        for reason in (*suite.lacks.values(), *suite.gaps.values()):
            assert f". {reason}" in table
    tests = {test for section in meanings().values() for test in section}
    assert {test for suite in found for test in suite.gaps} <= tests


def test_the_gaps_that_are_read_are_those_that_pytest_sees() -> None:
    """Read from source, as the suites are of frameworks that cannot all be installed together."""
    module = imported(ROOT / "packages/amanda-driver-tf/tests/eager/test_driver.py")
    marked = {}
    suite = module.TestTensorFlowEagerDriver
    for name, test in vars(suite).items():
        for mark in getattr(test, "pytestmark", []):
            if mark.name == "xfail":
                marked[name] = mark.kwargs["reason"]
    read = next(suite for suite in suites() if suite.title == "TensorFlow, eager")
    assert read.gaps == marked
    assert read.lacks == suite.lacks
    for tests in meanings().values():
        for name, needed in tests.items():
            assert (getattr(suite, name) is None) == bool(needed & suite.lacks.keys())


def test_every_capability_is_needed_by_a_test() -> None:
    assert capabilities() == CAPABILITIES
    assert {name for tests in meanings().values() for needed in tests.values() for name in needed} == set(
        CAPABILITIES
    )


def test_the_page_for_authors_of_drivers_has_the_tables_of_the_classes() -> None:
    page = drivers.PAGE.read_text()
    assert page == drivers.written(page), "python -m amanda_docs.drivers, with website/ on the path"


@pytest.mark.parametrize(
    "kind", [*(kind for kind, _ in drivers.OVERRIDDEN.values()), *drivers.HANDED.values()]
)
def test_every_public_name_of_a_class_has_words(kind: type) -> None:
    for name in drivers.public_names(kind):
        assert member_summary(kind, name), f"neither {kind.__name__}.{name} nor its class says what it is"


def test_every_required_name_is_on_a_rung() -> None:
    on_rungs = {name for rung in RUNGS for name in rung.implement}
    for kind, prefix in drivers.OVERRIDDEN.values():
        for name in getattr(kind, "__abstractmethods__", ()):
            assert prefix + name in on_rungs, f"no rung of the conformance suite names {prefix}{name}"


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("suite_of_a_driver", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("package", ["amanda.errors", *TOOLS, "amanda.drivers.onnxruntime"])
def test_every_public_error_has_a_page_whose_snippet_raises_it(package: str) -> None:
    module = importlib.import_module(package)
    errors = [name for name in module.__all__ if _is_error(getattr(module, name))]
    assert errors or package != "amanda.errors"
    for name in errors:
        page = DOCS / "errors" / f"{name}.md"
        assert page.exists(), f"{package}.{name} has no page docs/errors/{name}.md"
        assert re.search(rf"^except (\w+\.)*{name}( as error)?:$", page.read_text(), re.MULTILINE), page
        assert f"({name}.md)" in (DOCS / "errors" / "index.md").read_text()


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, AmandaError)


def test_both_front_pages_compare_alike() -> None:
    readme, index = (
        page.read_text().partition("\n## How it compares\n")[2]
        for page in (ROOT / "README.md", DOCS / "index.md")
    )
    comparison = readme.partition("\n[Coming from")[0].replace("](docs/", "](")
    assert "- **torch.profiler** " in comparison
    assert comparison == index.partition("\n[Migrating]")[0]


def test_every_dependency_is_on_the_page_about_installing() -> None:
    page = (DOCS / "install.md").read_text()
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        text = file.read_text()
        assert f"| {file.parent.name} |" in page, f"docs/install.md has no row for {file.parent.name}"
        listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        for name in re.findall(r'"([\w-]+)', listed[1] if listed else ""):
            assert name in page, f"docs/install.md does not name {name}, which {file.parent.name} needs"


def test_fields_of_a_docstring_become_a_list() -> None:
    text = "What it is.\n\nfolder: where to.  frames, all: which.\n  More.\nRaises OSError where it fails."
    fields = "- `folder`: where to.\n- `frames`, `all`: which.\n  More."
    assert as_markdown(text, {"folder", "frames", "all"}) == (
        f"What it is.\n\n{fields}\n\nRaises OSError where it fails."
    )


def test_sections_of_a_docstring_stay_as_they_are() -> None:
    sections = "Args:\n    folder: Where it is.  force: Replace it.\n\nRaises:\n    FileError: If it fails."
    assert as_markdown(f"Write it.\n\n{sections}", {"folder", "force"}) == f"Write it.\n\n{sections}"


def test_code_of_a_docstring_is_shown_as_code() -> None:
    text = "What it is.\n\nwith it:\n    run()\n\n    print(it)"
    assert as_markdown(text, set()) == "What it is.\n\n```python\nwith it:\n    run()\n\n    print(it)\n```"
    text = "What it is.\n\nit = run()\n\nMore of it.\n\n>>> 1 + 1\n2"
    code = "```python\nit = run()\n```"
    assert as_markdown(text, set()) == f"What it is.\n\n{code}\n\nMore of it.\n\n```pycon\n>>> 1 + 1\n2\n```"


def test_what_is_wrong_with_a_built_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="sub/#there">1</a><a href="sub/#gone">2</a><a href="gone/">3</a>'
        '<a href="https://other.org">4</a>'
        '<script src="https://cdn.org/x.js"></script><img src="gone.png">'
        '<link rel="stylesheet" href="own.css">'
    )
    (tmp_path / "sub" / "index.html").write_text('<h1 id="there">x</h1><a href="../#">up</a>')
    (tmp_path / "own.css").write_text("@import 'https://fonts.org/x.css';")
    assert problems(tmp_path) == [
        "index.html: loads https://cdn.org/x.js from another host",
        "index.html: loads gone.png, which is not there",
        "index.html: links to sub/#gone, which has no such anchor",
        "index.html: links to gone/, which is not there",
        "own.css: loads from another host",
    ]


def test_a_public_name_that_a_whole_module_does_not_show_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# a\n\n::: a.b\n    options:\n      x: y\n\n::: a.c.one\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "__init__.py").write_text('__all__ = ["shown", "left"]\n')
    (tmp_path / "page.html").write_text('<h2 id="a.b.shown">shown</h2>')
    assert undocumented(tmp_path, tmp_path, tmp_path) == [
        "a.b.left is not in the reference: it has no docstring"
    ]


def test_a_link_to_a_file_of_the_repository_leads_to_a_page_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amanda_docs.pages.PAGES", tmp_path)
    text = "[one](../examples/step.py) [two](tools.md#the-six-actions) [three](../examples/tutorial.ipynb)"
    given = relinked(text, DOCS / "index.md", tmp_path / "index.md")
    assert given == "[one](source/examples/step.py.md) [two](tools.md#the-six-actions) [three](tutorial.md)"
    assert (ROOT / "examples" / "step.py").read_text() in (
        tmp_path / "source/examples/step.py.md"
    ).read_text()
