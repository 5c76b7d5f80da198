"""Results from files, and of several processes as one."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import amanda
from amanda.errors import AmandaError
from amanda.options import Name, NonNegativeInt, checked
from amanda.plugins import tool_class
from amanda.tools.results._display import amount, shortened
from amanda.tools.results._files import in_words, number_of, read_json, schema_of, to_json
from amanda.tools.results._result import Column, Result


class Table(Result):
    """Rows under columns of any tool, from a file or merged from several results.

    Args:
        name: Schema of its files, which is `amanda.<name>`.
        version: Of the schema.
        columns: In order.
        rows: A value for every column each.
        title: Text above the table.
        notes: Sentences below the table.
        facts: What files contain besides the rows; None for nothing.
        lead: Sentence above the table, below the title.
    """

    def __init__(
        self, name: str, version: int, columns: Sequence[Column], rows: Sequence[Sequence[Any]],
        title: str = "", notes: Sequence[str] = (), facts: Mapping[str, Any] | None = None, lead: str = "",
    ) -> None:  # fmt: skip
        self.name, self.version = name, version  # type: ignore[misc]
        self.columns = tuple(columns)  # type: ignore[misc]
        self.title, self.lead = title, lead
        self._rows, self._notes, self._content = list(rows), tuple(notes), dict(facts or {})

    def rows(self) -> Sequence[Sequence[Any]]:
        return self._rows

    def notes(self) -> Sequence[str]:
        return self._notes

    def _facts(self) -> Mapping[str, Any]:
        return self._content

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Table:
        """Return a table of the `to_dict` of any result.  Raises KeyError, TypeError or ValueError."""
        version, title, rows = content["version"], content["title"], content["rows"]
        if type(version) is not int or not isinstance(title, str):
            raise ValueError(f"its version is {version!r}, and its title {title!r}")
        columns_and_values = [_read_column(description, [row[description["name"]] for row in rows])
                              for description in content["columns"]]  # fmt: skip
        lead = str(content.get("lead", ""))
        standard_fields = {"schema", "version", "title", "lead", "notes", "columns", "rows"}
        return cls(
            str(content["schema"]).removeprefix("amanda."), version, [pair[0] for pair in columns_and_values],
            list(zip(*(values for _, values in columns_and_values), strict=True)), title,
            [note for note in map(str, content["notes"]) if note != lead],  # a lead is among a file's notes
            {name: value for name, value in content.items() if name not in standard_fields}, lead,
        )  # fmt: skip


@checked
def load(path: str | Path) -> Result:
    """Return a result that `save` wrote as JSON: in its tool's class, or as a table without the tool.

    Args:
        path: File that `save` wrote.

    Raises:
        AmandaError: For a file that is none of a result, or of a version that its tool does not read.
    """
    return read_json(path, "file of a result", _checked_result)


def _checked_result(content: Mapping[str, Any]) -> Result:
    """Return a result that can be shown, saved and merged, so that a crafted file is refused here."""
    result: Any = restored(content)
    result.to_dict()
    # Shown and merged once: what fails here is the file's fault, later it would seem the tool's.
    str(result)
    if hasattr(type(result), "merged"):
        result.merged(result)
    return cast(Result, result)


def restored(content: Mapping[str, Any], like: Result | None = None) -> Result:
    """Return the result that `to_dict` described.

    Args:
        content: As it is, or from JSON; notes in it that the class does not write become remarks.
        like: Result whose class is taken if it has the same name, else the tool's is; `Table` without one.
    """
    name = schema_of(content).removeprefix("amanda.")
    result_class: Any = type(like) if like is not None and like.name == name else _result_class(name)
    if not hasattr(result_class, "from_dict"):
        return Table.of(content)
    result: Result = result_class.from_dict(content)
    # Notes that the class does not write itself were added by whoever saved the result.
    result.lead = str(content.get("lead", ""))
    class_notes = {result.lead, *result.notes()}
    result.remarks = [note for note in content.get("notes", ()) if note not in class_notes]
    return result


def _result_class(name: str) -> type | None:
    """Return the class of a tool's results, from the annotation of `result`; None where it has none."""
    try:
        tool: Any = tool_class(name)
        # The annotation names the class, so no tool has to register it.
        result_class = typing.get_type_hints(tool.result.fget)["return"]
    except (AmandaError, AttributeError, NameError, KeyError):
        return None
    is_result = isinstance(result_class, type) and getattr(result_class, "name", None) == name
    return result_class if is_result else None


def _read_column(description: Mapping[str, Any], values: Sequence[Any]) -> tuple[Column, Sequence[Any]]:
    """Return a column of a file and its values, as numbers if all are; raise ValueError for another form."""
    name, unit, merge = description["name"], description.get("unit", ""), description.get("merge", "")
    if not isinstance(name, str) or not isinstance(unit, str) or merge not in ("", *_MERGE_FUNCTIONS):
        raise ValueError(f"it has a column {dict(description)}")
    total = bool(description.get("total"))
    numbers = [number_of(value) for value in values]
    present_numbers = [value for value in numbers if value is not None]
    if not present_numbers:
        return Column(name, _text, total, unit=unit, merge=merge), values
    if not all(isinstance(value, (int, float)) for value in present_numbers):
        return Column(name, _text, unit=unit), values
    show_by_unit = {"B": partial(amount, unit="B"), "share": "{:.1%}".format}
    show: Any = show_by_unit.get(unit, _number)
    return Column(name, show, total, number=True, unit=unit, merge=merge), numbers


def _text(value: Any) -> str:
    return shortened(str(value), 44)


def _number(value: Any) -> str:
    return format(value, ".4g" if isinstance(value, float) else "," if isinstance(value, int) else "")


ResultT = TypeVar("ResultT")


@runtime_checkable
class Mergeable(Protocol):
    """A result that can be merged with those of other runs, ranks or processes."""

    def merged(self: ResultT, *results: ResultT) -> ResultT:
        """Return this and other results as one."""

    @classmethod
    def from_dict(cls: type[ResultT], content: Mapping[str, Any]) -> ResultT:
        """Return the result that `to_dict` described; raise ValueError for other schemas, newer versions."""


def can_merge(result: object) -> bool:
    """Return True if results of this class merge into one result, instead of rows side by side."""
    columns = result.columns if isinstance(result, Result) else ()
    return isinstance(result, Mergeable) or any(column.merge for column in columns)


@checked
def merge(results: Mapping[str, Result], missing: Sequence[Name] = ()) -> Result:
    """Return one result, merged from results of one tool.

    The result's `merged` is used, else `Column.merge` of its columns, else `by_rank`.  Merging merged results
    again gives the same numbers as merging all in one step.

    Args:
        results: Results by a name, such as "rank0".
        missing: Names of processes that left no result; a remark lists them.

    Raises:
        AmandaError: For no results, and for results of several tools or with different columns.
    """
    _check_same_tool(results)
    (first, *other_results), names = results.values(), _join_names(results)
    try:
        if not other_results:
            merged = copy(first)
        elif isinstance(first, Mergeable) and all(type(result) is type(first) for result in other_results):
            merged = cast(Result, cast(Any, first).merged(*other_results))
        else:
            has_merging_columns = any(column.merge for column in first.columns)
            merged = _merge_by_columns(results) if has_merging_columns else by_rank(results)
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # of values that somebody wrote
        raise AmandaError(f"results of {names} cannot be put together: {in_words(error)}") from error
    notes = attribute_notes({name: result.remarks for name, result in results.items()})
    if len(results) > 1 or missing:
        notes.append(f"Of {names}{' together' if len(results) > 1 else ''}.")
    if missing:
        notes.append(f"There is no result of {_join_names(missing)}.")
    merged.remarks, merged.lead = notes, _joint_lead(results)
    return merged


def by_rank(results: Mapping[str, Result]) -> Table:
    """Return the rows of several results of one tool, with a first column `rank`.

    Ranks of tables that have this column already become "host0.rank1".  Raises AmandaError for no results,
    and for results of several tools or with different columns.
    """
    _check_same_tool(results)
    first = next(iter(results.values()))
    notes = attribute_notes({name: result.notes() for name, result in results.items()})
    names_and_rows = [(name, row) for name, result in results.items() for row in result.rows()]
    if tool := _source_tool(first):  # these are tables by rank already
        columns, title = first.columns, first.title
        rows = [(f"{name}.rank{rank}" if isinstance(rank, int) else f"{name}.{rank}", *cells)
                for name, (rank, *cells) in names_and_rows]  # fmt: skip
    else:
        columns, title = (Column("rank", number=True), *first.columns), f"{first.title or first.name} by rank"
        rows = [(_rank_number(name), *row) for name, row in names_and_rows]
    table = Table(_RANKS, 1, columns, rows, title, notes, {"of": tool or first.name}, _joint_lead(results))
    table.remarks = attribute_notes({name: result.remarks for name, result in results.items()})
    return table


def attribute_notes(sentences: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each sentence once, after the names of its results unless all results have it."""
    names_by_sentence: dict[str, list[str]] = {}
    for name, result_sentences in sentences.items():
        for sentence in result_sentences:
            names_by_sentence.setdefault(sentence, []).append(name)
    return [sentence if len(names) == len(sentences) else f"{', '.join(names)}: {sentence}"
            for sentence, names in names_by_sentence.items()]  # fmt: skip


def _joint_lead(results: Mapping[str, Result]) -> str:
    """Return the leads of results as one, each after the names of its results unless all have it."""
    leads = {name: [result.lead] if result.lead else [] for name, result in results.items()}
    return " ".join(attribute_notes(leads))


_RANKS = "ranks"
_MERGE_FUNCTIONS: Mapping[str, Callable[[Sequence[Any]], Any]] = {"sum": sum, "min": min, "max": max}


def _merge_by_columns(results: Mapping[str, Result]) -> Table:
    """Return a table with a row for all rows that agree in the columns without `merge`; the others merge."""
    first = next(iter(results.values()))
    key_positions = [i for i, column in enumerate(first.columns) if not column.merge]
    rows_by_key: dict[str, list[Sequence[Any]]] = {}
    for row in (row for result in results.values() for row in result.rows()):
        # By repr, as values of a file may be lists, which are not hashable.
        rows_by_key.setdefault(repr([row[i] for i in key_positions]), []).append(row)
    rows = [[_merge_values(column, values) for column, *values in zip(first.columns, *equals, strict=True)]
            for equals in rows_by_key.values()]  # fmt: skip
    notes = attribute_notes({name: result.notes() for name, result in results.items()})
    facts = {"of": tool} if (tool := _source_tool(first)) else {}
    return Table(first.name, first.version, first.columns, rows, first.title, notes, facts)


def _merge_values(column: Column, values: Sequence[Any]) -> Any:
    """Merge the values of a column: into the first if it does not merge, into None if all are None."""
    present_values = [value for value in values if value is not None]
    return _MERGE_FUNCTIONS[column.merge](present_values) if column.merge and present_values else values[0]


def _check_same_tool(results: Mapping[str, Result]) -> None:
    """Raise AmandaError unless all are of one tool and have the same columns, in the same order."""
    if not results:
        raise AmandaError("there is no result to be merged")
    schemas = {
        name: f"{_source_tool(result)} by rank" if _source_tool(result) else f"{result.name} {result.version}"
        for name, result in results.items()
    }
    if len(set(schemas.values())) > 1:
        contents = ", ".join(f"{name} has {kind}" for name, kind in schemas.items())
        raise AmandaError(f"results of one tool are merged: {contents}")
    (name, first), *rest_of_results = results.items()
    for other_name, result in rest_of_results:
        if _column_keys(result) != _column_keys(first):
            raise AmandaError(
                f"results with the same columns, in the same order, are merged: {name} has "
                f"{', '.join(_column_keys(first))}; {other_name} has {', '.join(_column_keys(result))}"
            )


def _column_keys(result: Result) -> list[str]:
    return [f"{column.name} ({column.merge})" if column.merge else column.name for column in result.columns]


def _source_tool(result: Result) -> str:
    return str(result._facts().get("of", "")) if isinstance(result, Table) and result.name == _RANKS else ""


def _rank_number(name: str) -> int | str:
    """Return 1 for "rank1"; any other name as it is."""
    number = name.removeprefix("rank")
    return int(number) if number.isdecimal() else name


def _join_names(names: Iterable[str]) -> str:
    """Return names as a sentence lists them: "a, b and c"."""
    *other_names, last = names
    return f"{', '.join(other_names)} and {last}" if other_names else last


@checked
def gather(
    result: Result, group: Any = None, *, to: NonNegativeInt | None = None, per_rank: bool = False
) -> Any:
    """Return the merged result of all ranks of a process group; every rank calls this with its own.

    The result has the class of the ranks' results if these can be merged (see `merge`), else `Table`.

    Args:
        result: The result of this rank.
        group: Of `torch.distributed`; the default group if None.
        to: Global rank that gets the result; the others get None.  None for every rank.
        per_rank: Keep the rows of each rank, with a column `rank`.

    Raises:
        AmandaError: Where `torch.distributed` is not initialised, where ranks give results of several tools,
            and where one gives none.

    merged = gather(flops.result, to=0)
    """
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise AmandaError(
            "gather puts together what the ranks of torch.distributed have, and there is no process group: "
            "torch.distributed.init_process_group(...) comes first"
        )
    # Collectives of the merge are not ops of the program.
    with amanda.disabled():
        # As JSON: ranks read each other's results as they read files, with the same checks.  A rank without a
        # result sends the name of a class, which does not begin with "{".
        text = to_json(result.to_dict()) if isinstance(result, Result) else type(result).__name__
        texts: list[Any] = [None] * distributed.get_world_size(group)
        if to is None:
            distributed.all_gather_object(texts, text, group)
        else:
            is_receiver = distributed.get_rank() == to
            distributed.gather_object(text, texts if is_receiver else None, dst=to, group=group)
            if not is_receiver:
                return None
        ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    text_by_rank = {f"rank{rank}": text for rank, text in zip(ranks, texts, strict=True)}
    missing = [f"{name} gave {text}" for name, text in text_by_rank.items() if not text.startswith("{")]
    if missing:
        raise AmandaError(f"gather takes the result of a tool on every rank; {', '.join(missing)}")
    results = {name: restored(json.loads(text), result) for name, text in text_by_rank.items()}
    return by_rank(results) if per_rank else merge(results)
