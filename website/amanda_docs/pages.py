"""What the site is built of: build/docs, the pages and what they link to, and build/api, the packages."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from amanda_docs.gaps import MARKER, gaps_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BUILD = ROOT / "build"
PAGES = BUILD / "docs"
ELSEWHERE = {
    "CONTRIBUTING.md": "contributing.md",
    "examples/tutorial.ipynb": "tutorial.md",
    "examples/tutorial_tensorflow.ipynb": "tutorial_tensorflow.md",
}
"""Files outside of docs/ that are pages of their own, and where."""
GENERATED = tuple(ELSEWHERE.values())
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
API = """
## API

::: amanda.tools.{}
    options:
      show_root_heading: false
      show_root_toc_entry: false
"""
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def write_pages() -> None:
    """Copy docs/ to build/docs; a link to a file of the repository leads to a page that shows it."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES)
    shutil.copytree(ROOT / "website" / "assets", PAGES / "assets")
    for page in PAGES.rglob("*.md"):
        at = DOCS / page.relative_to(PAGES)
        text = page.read_text().replace(MARKER, gaps_table())
        page.write_text(relinked(text + _api_of(at), at, page))
    guide = ROOT / "CONTRIBUTING.md"
    page = PAGES / ELSEWHERE[guide.name]
    page.write_text(relinked(guide.read_text(), guide, page))


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
    """What is put at the end of the page of a tool: the reference of its package."""
    package = ROOT / "packages/amanda-tools/src/amanda/tools" / page.stem
    return API.format(page.stem) if page.parent == DOCS / "tools" and package.is_dir() else ""


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
