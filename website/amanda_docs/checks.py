"""What is wrong with a built site: links that lead nowhere, what it loads from elsewhere, names it lacks."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"audio", "embed", "iframe", "img", "link", "object", "script", "source", "track", "video"}
WHOLE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
IN_STYLES = re.compile(r"""url\(\s*['"]?(?:https?:)?//|@import\s+['"](?:https?:)?//""")


class Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and values.get("rel") != "canonical":
            self.loaded += [values[name] for name in ("href", "src", "data", "poster") if name in values]


def problems(site: Path) -> list[str]:
    """Each link, image or script of the site that is broken, or that asks another host."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = [f"{path.relative_to(site)}: {text}" for path in pages for text in _of_page(path, pages, site)]
    for style in sorted(site.rglob("*.css")):
        if IN_STYLES.search(style.read_text()):
            found.append(f"{style.relative_to(site)}: loads from another host")
    return found


def undocumented(site: Path, pages: Path, api: Path) -> list[str]:
    """Public names of the modules that pages show whole, and that are not there: they have no docstring."""
    anchors = {anchor for path in site.rglob("*.html") for anchor in Page(path.read_text()).anchors}
    shown = {name for page in pages.rglob("*.md") for name in WHOLE.findall(page.read_text())}
    return [
        f"{module}.{name} is not in the reference: it has no docstring"
        for module in sorted(shown)
        for name in _public_names(api / module.replace(".", "/"))
        if f"{module}.{name}" not in anchors
    ]


def _public_names(module: Path) -> list[str]:
    """What is in `__all__` of a module, or a package; nothing where it is neither."""
    for file in (module.with_suffix(".py"), module / "__init__.py"):
        for node in ast.parse(file.read_text()).body if file.exists() else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
    return []


def _of_page(path: Path, pages: dict[Path, Page], site: Path) -> Iterator[str]:
    page = pages[path]
    for target in page.loaded:
        if urlsplit(target).netloc:
            yield f"loads {target} from another host"
        elif not target.startswith("data:") and _file(path, target) is None:
            yield f"loads {target}, which is not there"
    for target in page.links:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        file = _file(path, target)
        if file is None or not file.is_relative_to(site):
            yield f"links to {target}, which is not there"
        elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
            yield f"links to {target}, which has no such anchor"


def _file(path: Path, target: str) -> Path | None:
    """The file that a link of a page leads to, None where there is none."""
    name = unquote(urlsplit(target).path)
    goal = Path(os.path.normpath(path.parent / name)) if name else path
    if goal.is_dir():
        goal /= "index.html"
    return goal if goal.is_file() else None
