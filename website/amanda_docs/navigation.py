"""Which pages the navigation of mkdocs.yml lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from amanda_docs.pages import DOCS, GENERATED, ROOT

LINE = "`      - Its title: {page}` in a section of nav"


def listed() -> list[str]:
    """The pages in the order of the navigation."""
    # The builders of the site put the values of environment variables in for `!ENV`, which YAML lacks.
    text = (ROOT / "mkdocs.yml").read_text().replace("!ENV ", "")
    return list(_leaves(yaml.safe_load(text)["nav"]))


def unlisted() -> list[str]:
    """What is wrong with the navigation: pages that it lacks, lists twice, or has in vain."""
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(GENERATED)
    found = listed()
    lacking = (
        f"docs/{page} is not in mkdocs.yml: add {LINE.format(page=page)}" for page in pages - set(found)
    )
    return [
        *sorted(lacking),
        *(f"mkdocs.yml lists {page}, which docs/ has not" for page in found if page not in pages),
        *(f"mkdocs.yml lists {page} twice" for page in sorted(set(found)) if found.count(page) > 1),
    ]


def _leaves(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    else:
        for entry in entries.values() if isinstance(entries, dict) else entries:
            yield from _leaves(entry)
