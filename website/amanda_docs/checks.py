"""What is wrong with a built site: links and anchors that lead nowhere, and what it loads from elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"audio", "embed", "iframe", "img", "link", "object", "script", "source", "track", "video"}
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
