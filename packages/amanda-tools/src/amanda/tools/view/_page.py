"""The page: template, style and scripts of this package around what was saved."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from amanda.errors import AmandaError
from amanda.options import checked
from amanda.tools.results import Result, parsing
from amanda.tools.view._files import Source, read
from amanda.tools.view._graph import graph, op_columns, stages
from amanda.tools.view._tables import Ops, is_about_ops, ops_named_by, table

_SCRIPTS = "dom model tree layout graph table chart diff details main".split()


@checked
def to_page(*results: str | Path | Result, title: str | None = None) -> str:
    """Return a self-contained HTML page of saved files, or of results themselves.

    The first trace among them gives the graph; tables of ops become columns beside it.  Raises AmandaError
    where a file cannot be read or is of no schema that is known.
    """
    if not results:
        raise AmandaError("a page is made of one result or more; none was given")
    sources = [read(result) for result in results]
    names = ", ".join(source.name for source in sources)
    heading = title or names
    with parsing(names, "result"):
        data = _embedded(document(sources, heading))
    style, script = _text("view.css"), _script()
    library = _text("dagre.min.js").partition("//# sourceMappingURL")[0]
    parts = {
        "title": escape(heading),
        "policy": _policy(style, (library, script)),
        "style": style,
        "notice": escape(_text("dagre.LICENSE")).replace("--", "- -"),
        "library": library,
        "data": data,
        "script": script,
    }
    return re.sub(r"{{(.*?)}}", lambda match: parts[match[1]], _text("index.html"))


def document(sources: Sequence[Source], title: str) -> dict[str, Any]:
    """Return all that the page shows, as plain values."""
    trace = next((source for source in sources if source.schema == "amanda.trace"), None)
    tables = [source for source in sources if source is not trace]
    rows = (source.list_of("rows") for source in tables if is_about_ops(source))
    ops = ops_named_by(*rows) if trace is None else trace.list_of("ops")
    page_ops = Ops(ops)
    partition = next((source for source in sources if source.schema == "amanda.partition"), None)
    return {
        "title": title,
        "sources": [
            {key: getattr(source, key) for key in ("name", "schema", "version")} for source in sources
        ],
        "notes": [note for source in sources for note in _notes(source)],
        "facts": [fact for source in sources for fact in _facts(source)],
        "ops": op_columns(ops),
        "graph": None if trace is None else graph(trace),
        "stages": {} if partition is None else stages(partition, page_ops),
        "tables": [table(source, page_ops) for source in tables],
    }


def _notes(source: Source) -> list[str]:
    notes = source.content.get("notes")
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _facts(source: Source) -> list[tuple[str, str]]:
    """Return facts of the run as a whole."""
    frameworks, dropped = source.content.get("frameworks"), source.content.get("dropped")
    facts = [("framework", ", ".join(map(str, frameworks)))] if isinstance(frameworks, list) else []
    return facts + ([(f"not in {source.name}", f"{dropped} ops")] if dropped else [])


def _embedded(content: Any) -> str:
    """Return JSON that ends no script element and is valid for every parser."""
    try:
        text = _json(content)
    except ValueError:  # numbers that JSON has not become words
        text = _json(json.loads(json.dumps(content), parse_constant=str))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.encode("utf-8", "backslashreplace").decode()


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Return a policy: nothing is loaded, and no script runs but those of the page."""
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return f"default-src 'none'; img-src data:; style-src 'sha256-{_digest(style)}'; script-src {allowed}"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _script() -> str:
    modules = "\n".join(_text(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{modules}\n}})();\n'


def _text(name: str) -> str:
    return (files("amanda.tools.view") / "page" / name).read_text(encoding="utf-8")
