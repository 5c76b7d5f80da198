"""What the site is built of: build/docs, the pages and what they link to, and build/api, the packages."""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path

from amanda_docs import contents, differences, gaps

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BUILD = ROOT / "build"
PAGES = BUILD / "docs"
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/tutorial.ipynb": "tutorial.md",
    "examples/tutorial_tensorflow.ipynb": "tutorial_tensorflow.md",
}
"""Files outside of docs/ that are pages of their own, and where."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
API = """
## API

::: amanda.tools.{package}
    options:
      show_root_heading: false
      show_root_toc_entry: false
      members: {members}
"""
TOOLS = "tools/all.md"
REPOSITORY = "AMANDA_REPOSITORY"
"""Environment variable with the address of the repository, which mkdocs.yml reads too."""
GENERATED = (*ELSEWHERE.values(), TOOLS)
TABLES = {
    module.MARKER: table
    for module, table in (
        (gaps, gaps.gaps_table), (contents, contents.contents), (differences, differences.differences),
    )
}  # fmt: skip
"""Tables that take the place of a marker in a page."""
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def write_pages() -> None:
    """Copy docs/ to build/docs; a link to a file of the repository leads to a page that shows it."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES)
    shutil.copytree(ROOT / "website" / "assets", PAGES / "assets")
    # A list: pages that show files of the repository are added meanwhile.
    for page in list(PAGES.rglob("*.md")):
        at = DOCS / page.relative_to(PAGES)
        text = page.read_text()
        for marker, table in TABLES.items():
            if marker in text:
                text = text.replace(marker, table())
        page.write_text(relinked(_addressed(text) + _api_of(at), at, page))
    (PAGES / TOOLS).write_text(relinked(_list_of_tools(), DOCS / "tools.md", PAGES / TOOLS))
    for guide in sorted(ROOT.glob("*.md")):
        if guide.name in ELSEWHERE:
            page = PAGES / ELSEWHERE[guide.name]
            page.write_text(relinked(guide.read_text(), guide, page))


def _addressed(text: str) -> str:
    """Put the address of the repository in its place, where AMANDA_REPOSITORY gives it."""
    return text.replace("git+ADDRESS", f"git+{os.environ.get(REPOSITORY, 'ADDRESS')}")


def relinked(text: str, at: Path, page: Path) -> str:
    """A page's text, whose links to the repository's files, from `at`, are made links from `page`."""

    def link(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(at.parent / found[1]))
        if not target.exists():
            return found[1]
        if target.is_relative_to(DOCS):
            goal = PAGES / target.relative_to(DOCS)
        elif target.relative_to(ROOT).as_posix() in ELSEWHERE:
            goal = PAGES / ELSEWHERE[target.relative_to(ROOT).as_posix()]
        else:
            goal = _shown(target)
        return os.path.relpath(goal, page.parent)

    return LINK.sub(link, text)


def write_api() -> None:
    """Put the packages of all distributions into one tree, as they are when installed."""
    api = BUILD / "api"
    shutil.rmtree(api, ignore_errors=True)
    for source in sorted(ROOT.glob("packages/*/src/amanda")):
        skipped = shutil.ignore_patterns("__init__.pyi", "__pycache__", "*.so", "native", "_build.py")
        shutil.copytree(source, api / "amanda", ignore=skipped, dirs_exist_ok=True)
    for folder in ("drivers", "tools"):
        (api / "amanda" / folder / "__init__.py").touch()
    # What it says besides is how the parts find each other when they are installed apart.
    (api / "amanda" / "__init__.py").write_text('"""Amanda."""\n\nfrom amanda._api import *\n')


def _api_of(page: Path) -> str:
    """What is put at the end of the page of a tool: the reference of its package, first the tool."""
    packages = list(ROOT.glob(f"packages/*/src/amanda/tools/{page.stem}/__init__.py"))
    if page.parent != DOCS / "tools" or not packages:
        return ""
    (names,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(packages[0].read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    ranks = {"Tool": -2, "Result": -1, "Error": 1}
    members = sorted(names, key=lambda name: next((ranks[end] for end in ranks if name.endswith(end)), 0))
    return API.format(package=page.stem, members=members)


def _list_of_tools() -> str:
    """The list of tools at the end of the page about writing one, as a page of the folder of their pages."""
    guide = (DOCS / "tools.md").read_text()
    section = guide.partition("## Tools that come with Amanda\n")[2]
    return f"# Tools\n{section}"


def _shown(file: Path) -> Path:
    """A page that shows a file, or lists a folder."""
    name = file.relative_to(ROOT).as_posix()
    page = PAGES / "source" / (f"{name}/index.md" if file.is_dir() else f"{name}.md")
    if page.exists():
        return page
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("")
    if file.is_dir():
        files = sorted(one for one in file.iterdir() if one.is_file() and one.suffix in LANGUAGES)
        body = "\n".join(f"- [{one.name}]({os.path.relpath(_shown(one), page.parent)})" for one in files)
    else:
        body = f"`````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}`````"
    page.write_text(f"{HIDDEN}# {name}\n\n{body}\n")
    return page
