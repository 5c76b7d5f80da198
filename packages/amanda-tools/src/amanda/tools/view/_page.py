"""`amanda view`: saved results, read and checked; their tables and graph, in the template of this package."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import webbrowser
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import click

from amanda.errors import AmandaError
from amanda.files import write_file
from amanda.options import checked
from amanda.tools.command import exit_status, limit_option, path_to_write
from amanda.tools.results import Result, check_schema, number_of, parsing, read_json, schema_of


@dataclass(frozen=True)
class Source:
    """One file, or one result that was never in a file.  name: for people.  schema: `amanda.<tool>`."""

    name: str
    schema: str
    version: Any
    content: Mapping[str, Any]

    def objects_at(self, key: str) -> list[dict[str, Any]]:
        """Return the list of objects under a key; [] without the key, AmandaError for any other value."""
        values = self.content.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise AmandaError(f"{self.name}: `{key}` is to be a list of objects, as {self.schema} has it")
        return values


def read(result: str | Path | Result) -> Source:
    """Return a file or a result, with its schema known; raise AmandaError where that cannot be."""
    if isinstance(result, Result):
        return _checked_source(result.name, result.to_dict())
    path = Path(result)
    return read_json(path, "file of a result", lambda content: _checked_source(path.name, content))


def _checked_source(name: str, content: Any) -> Source:
    """Return a file's content by its schema; raise AmandaError for a Chrome trace, ValueError for others."""
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if isinstance(events, list):  # a Chrome trace is an object with a list of events, or the list alone
        raise AmandaError(
            f"{name} is a Chrome trace; open it in https://ui.perfetto.dev. A profile saved as "
            '"profile.json" has the times of the same ops for this page'
        )
    schema = schema_of(content)
    if schema == "amanda.trace":  # of which more is read than the table
        check_schema(content, "trace", 1)
    return Source(name, schema, content.get("version"), content)


def by_column(names: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of rows by columns, in which form a page is small; None where a row lacks one."""
    return {name: [row.get(name) for row in rows] for name in names}


KEYS = ("phase", "type", "module", "source")
"""Columns that tell ops apart in every table of ops."""

Key = tuple[str, ...]
Row = Mapping[str, Any]


class Ops:
    """The ops of a page, and how rows find them."""

    def __init__(self, ops: Iterable[Row]) -> None:
        self._by_key: dict[Key, list[int]] = defaultdict(list)
        self._by_id: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, op in enumerate(ops):
            self._by_key[key_of(op)].append(index)
            if op.get("id") is not None:
                self._by_id[_id_and_phase(op)].append(index)

    def about(self, row: Row) -> list[int]:
        """Return indices of the ops with a row's id and phase, else of those with the same `key_of`."""
        indices = None if row.get("id") is None else self._by_id.get(_id_and_phase(row))
        return indices or self._by_key.get(key_of(row), [])


def _id_and_phase(row: Row) -> tuple[str, str]:
    """Return an op id as 16 hexadecimal digits, however a tool writes it, and the phase."""
    number = row["id"]
    # 64 bits as text: numbers of JavaScript are exact up to 53.
    text = f"{number:x}" if isinstance(number, int) else str(number).removeprefix("0x")
    return text.zfill(16), str(row.get("phase", ""))


def key_of(row: Row) -> Key:
    """Return what is the same in all tables for one op."""
    return tuple(str(row.get(key) or "") for key in KEYS)


def is_about_ops(source: Source) -> bool:
    """Return True if its rows say which op they are about."""
    rows = source.objects_at("rows")
    return bool(rows) and all(key in rows[0] for key in KEYS)


def table(source: Source, ops: Ops) -> dict[str, Any]:
    """Return the columns and rows of a table, and under "ops" the indices of the ops that each row is about.

    None for "ops" where the table is about something else.  As many rows as there are ops of one key are
    theirs in turn, unless texts in other columns tell the rows apart; otherwise each is about all of them.
    """
    columns, rows = _columns(source), source.objects_at("rows")
    names = [column["name"] for column in columns]
    return {
        "name": source.name, "schema": source.schema,
        "title": _text_of(source.content.get("title")) or source.schema.removeprefix("amanda."),
        "columns": columns, "rows": [[number_of(row.get(name)) for name in names] for row in rows],
        "first": source.content.get("first"),
        "ops": _op_indices_of_rows(rows, columns, ops) if is_about_ops(source) else None,
    }  # fmt: skip


def _op_indices_of_rows(rows: Sequence[Row], columns: Sequence[Row], ops: Ops) -> list[list[int]]:
    """Return the indices of the ops that each row is about, one alone where rows and ops go in pairs."""
    indices_of_rows = [ops.about(row) for row in rows]
    # A further text, such as the name of a tensor, may tell rows of one op apart.
    further_columns = {column["name"] for column in columns if not column["number"]} - {*KEYS, "id", "name"}
    if any(isinstance(row.get(name), str) for row in rows for name in further_columns):
        return indices_of_rows
    rows_by_op_indices: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, indices in enumerate(indices_of_rows):
        rows_by_op_indices[tuple(indices)].append(row)
    for indices_of_key, rows_of_key in rows_by_op_indices.items():
        # As many rows as ops of one key: they are in the order of execution, one each.
        if len(indices_of_key) == len(rows_of_key) > 1:
            for row, index in zip(rows_of_key, indices_of_key, strict=True):
                indices_of_rows[row] = [index]
    return indices_of_rows


def _columns(source: Source) -> list[dict[str, Any]]:
    """Return the columns of a table: those that the file describes, then those of its first row.

    Each has a name, whether all its values are numbers, whether it has a total, and a unit.
    Raises AmandaError for rows without any column.
    """
    rows, columns = source.objects_at("rows"), source.content.get("columns")
    objects = [column for column in columns if isinstance(column, dict)] if isinstance(columns, list) else []
    column_by_name = {column["name"]: column for column in objects if isinstance(column.get("name"), str)}
    names = dict.fromkeys((*column_by_name, *(rows[0] if rows else ())))
    if not names and rows:
        raise AmandaError(f"{source.name}: the rows of {source.schema} are empty objects")
    return [
        {"name": name, "number": _are_numbers([row.get(name) for row in rows]),
         "total": bool(column.get("total")), "unit": _text_of(column.get("unit"))}
        for name in names for column in [column_by_name.get(name, {})]
    ]  # fmt: skip


def _are_numbers(values: Sequence[Any]) -> bool:
    """Return True if all values but None are numbers, or words for NaN and infinities, and there are some."""
    present_numbers = [number_of(value) for value in values if value is not None]
    return bool(present_numbers) and all(
        isinstance(number, (int, float)) and not isinstance(number, bool) for number in present_numbers
    )


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""


_TEXT_FIELDS = ("phase", "type", "name", "module", "source")
_OTHER_FIELDS = ("id", "inputs", "outputs", "writes", "forward", "calls", "in_place", "attributes")
_TENSOR_FIELDS = ("shape", "dtype", "bytes", "kind", "name", "producer", "consumers", "alias_of")


def op_columns(ops: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return columns of ops by name: all of _TEXT_FIELDS as texts, "" for None, and others as they are.

    Of _OTHER_FIELDS those that any op has; further fields of the file are left out.
    """
    text_columns = {
        name: ["" if value is None else str(value) for value in values]
        for name, values in by_column(_TEXT_FIELDS, ops).items()
    }
    other_fields = [name for name in _OTHER_FIELDS if any(op.get(name) is not None for op in ops)]
    return {**text_columns, **by_column(other_fields, ops)}


def graph(source: Source) -> dict[str, Any]:
    """Return the tensors of a trace, and the edges between its ops.

    An edge is (producer, consumer, tensor); one that comes from outside has -1 for a producer.
    Raises AmandaError for an index that refers to nothing.
    """
    tensors, op_count = source.objects_at("tensors"), len(source.objects_at("ops"))
    edges: list[int] = []
    for index, tensor in enumerate(tensors):
        producer = tensor.get("producer")
        is_from_outside = producer is None
        for consumer in tensor.get("consumers") or []:
            for op in (consumer,) if is_from_outside else (consumer, producer):
                if not isinstance(op, int) or not 0 <= op < op_count:
                    wrong_name = f"{source.name}: tensor {index} names op {op!r}"
                    raise AmandaError(f"{wrong_name}, but the ops are numbered 0 to {op_count - 1}")
            # Of tensors from outside, parameters and constants have no edge.
            has_edge = tensor.get("kind") == "input" if is_from_outside else producer != consumer
            if has_edge:
                # Flat, since a list for each edge would make the page larger.
                edges += (-1 if producer is None else producer, consumer, index)
    return {"tensors": by_column(_TENSOR_FIELDS, tensors), "edges": edges}


def stages(source: Source, ops: Ops) -> dict[int, int]:
    """Return a partition's stages by the index of the op; its rows of one place are in execution order."""
    stage_of_op: dict[int, int] = {}
    for row in source.objects_at("ops"):
        # The first op of the row's place that no earlier row has taken.
        index = next((op for op in ops.about(row) if op not in stage_of_op), None)
        if index is not None and isinstance(row.get("stage"), int):
            stage_of_op[index] = row["stage"]
    return stage_of_op


_SCRIPTS = "dom model tree layout graph table chart diff details main".split()


@checked
def to_page(*results: str | Path | Result, title: str | None = None) -> str:
    """Return a self-contained HTML page of saved files, or of results themselves.

    The first trace among them gives the graph; tables of ops become columns beside it.

    Args:
        *results: Paths of files, paths of folders with such files, or results.
        title: Title of the page; None for the names of the results.

    Raises:
        AmandaError: Where a file cannot be read or is of no schema that is known.
    """
    if not results:
        raise AmandaError("a page is made of one result or more; none was given")
    sources = [read(file) for result in results for file in _files_of(result)]
    names = ", ".join(source.name for source in sources)
    heading = title or names
    with parsing(names, "result"):
        data = _embedded(document(sources, heading))
    # One function around all, so that the page has no globals; browsers load no modules from files.
    modules = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    style, script = _asset("view.css"), f'"use strict";\n(() => {{\n{modules}\n}})();\n'
    library = _asset("dagre.min.js").partition("//# sourceMappingURL")[0]
    parts = {
        "title": escape(heading), "policy": _policy(style, (library, script)), "style": style,
        "notice": escape(_asset("dagre.LICENSE")).replace("--", "- -"), "library": library, "data": data,
        "script": script,
    }  # fmt: skip
    return re.sub(r"{{(.*?)}}", lambda match: parts[match[1]], _asset("index.html"))


def _files_of(result: str | Path | Result) -> Sequence[str | Path | Result]:
    """Return the .json files of a folder, anything else alone; raise AmandaError for a folder without any."""
    if isinstance(result, Result) or not Path(result).is_dir():
        return [result]
    paths = sorted(Path(result).glob("*.json"))
    if not paths:
        raise AmandaError(f"{result} is a folder without .json files, as `amanda run -o` makes them")
    return paths


def document(sources: Sequence[Source], title: str) -> dict[str, Any]:
    """Return all that the page shows, as plain values: of the first trace the graph, of the others tables."""
    trace = next((source for source in sources if source.schema == "amanda.trace"), None)
    tables = [source for source in sources if source is not trace]
    if trace is not None:
        ops = trace.objects_at("ops")
    else:  # those that rows name, in order, each place once
        rows = (row for source in tables if is_about_ops(source) for row in source.objects_at("rows"))
        ops = [dict(zip(KEYS, key, strict=True)) for key in dict.fromkeys(map(key_of, rows))]
    page_ops = Ops(ops)
    partition = next((source for source in sources if source.schema == "amanda.partition"), None)
    return {
        "title": title,
        "sources": [{"name": source.name, "schema": source.schema, "version": source.version}
                    for source in sources],
        "notes": [note for source in sources for note in _notes(source)],
        "facts": [fact for source in sources for fact in _run_facts(source)], "ops": op_columns(ops),
        "graph": None if trace is None else graph(trace),
        "stages": {} if partition is None else stages(partition, page_ops),
        "tables": [table(source, page_ops) for source in tables],
    }  # fmt: skip


def _notes(source: Source) -> list[str]:
    notes = source.content.get("notes")
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _run_facts(source: Source) -> list[tuple[str, str]]:
    frameworks, dropped = source.content.get("frameworks"), source.content.get("dropped")
    facts = [("framework", ", ".join(map(str, frameworks)))] if isinstance(frameworks, list) else []
    return facts + ([(f"not in {source.name}", f"{dropped} ops")] if dropped else [])


def _embedded(content: Any) -> str:
    """Return JSON that ends no script element and is valid for every parser."""
    try:
        text = _json(content)
    except ValueError:  # numbers that JSON has not become words
        text = _json(json.loads(json.dumps(content), parse_constant=str))
    # Text such as </script> in a name would end the script; U+2028 ends lines in older parsers.
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.encode("utf-8", "backslashreplace").decode()


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Return a policy: nothing is loaded, and no script runs but those of the page."""
    # By hash, so that text from a file can never run as a script.
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return f"default-src 'none'; img-src data:; style-src 'sha256-{_digest(style)}'; script-src {hashes}"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return (files("amanda.tools.view") / "page" / name).read_text(encoding="utf-8")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=path_to_write(".html", ".htm"), metavar="PAGE",
    help="Page to write; by default the first file's name with .view.html, in the working directory.",
)  # fmt: skip
@click.option("--title", help="Title of the page; by default the file names.")
@limit_option
@click.option("--open", "shown", is_flag=True, help="Show the page in a browser.")
def _command(files: Sequence[Path], output: Path | None, title: str | None, shown: bool) -> None:
    """Make one self-contained HTML page of saved results.

    The page has a tree of modules, the graph, tables, and differences between runs. FILES are .json files of
    a result's save(), also gzipped, or folders of `amanda run -o`. Of several files, results for the same op
    are shown together. Chrome traces open in https://ui.perfetto.dev instead.
    """
    page = output or Path(f"{files[0].absolute().name.removesuffix('.gz').removesuffix('.json')}.view.html")
    write_file(page, to_page(*files, title=title))
    sys.stdout.write(f"{page}\n")
    if shown:
        webbrowser.open(page.resolve().as_uri())


def main(arguments: Sequence[str]) -> int:
    """Make one self-contained HTML page of saved results."""
    return exit_status(_command, "amanda view", arguments)
