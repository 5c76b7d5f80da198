"""Results of tools, which print as a table and go to pandas, JSON, CSV and HTML.

class Counts(Result):
    name, version = "counts", 1
    columns = (Column("op"), Column("calls", total=True))

    def rows(self):
        return [("conv2d", 53), ("relu", 49)]
"""

from amanda.tools.results._display import NOTHING, amount, count_of, not_met, shortened
from amanda.tools.results._files import (
    TooLargeError,
    check_file,
    check_schema,
    check_size,
    field_values,
    in_words,
    is_lock,
    locked,
    made_of,
    number_of,
    parsing,
    read_json,
    read_npz,
    read_text,
    reading,
    schema_of,
    to_json,
)
from amanda.tools.results._keyed import KeyedResult, PlacesResult
from amanda.tools.results._layout import folded
from amanda.tools.results._merging import Mergeable, Table, by_rank, can_merge, gather, load, merge, restored
from amanda.tools.results._result import Column, Result

__all__ = [
    "NOTHING", "Column", "KeyedResult", "Mergeable", "PlacesResult", "Result", "Table", "TooLargeError",
    "amount", "by_rank", "can_merge", "check_file", "check_schema", "check_size", "count_of", "field_values",
    "folded", "gather", "in_words", "is_lock", "load", "locked", "made_of", "merge", "not_met",
    "number_of", "parsing", "read_json", "read_npz", "read_text", "reading", "restored", "schema_of",
    "shortened", "to_json",
]  # fmt: skip
