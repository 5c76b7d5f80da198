"""Results of tools, which print as a table and go to pandas, JSON, CSV and HTML.

class Counts(Result):
    name, version = "counts", 1
    columns = (Column("op"), Column("calls", total=True))

    def rows(self):
        return [("conv2d", 53), ("relu", 49)]
"""

from amanda.tools.results._fields import made_of
from amanda.tools.results._files import check_schema, in_words, number_of, parsing, read_json, to_json
from amanda.tools.results._gathering import gather
from amanda.tools.results._keyed import KeyedResult, PlacesResult
from amanda.tools.results._limits import TooLargeError, check_file, check_size, read_npz, read_text, reading
from amanda.tools.results._locked import is_lock, locked
from amanda.tools.results._merging import Mergeable, by_rank, can_merge, merge
from amanda.tools.results._plotted import PlottedResult
from amanda.tools.results._result import Column, Result
from amanda.tools.results._table import Table, load, restored
from amanda.tools.results._text import NOTHING, amount, not_met, shortened

__all__ = [
    "NOTHING", "Column", "KeyedResult", "Mergeable", "PlacesResult", "PlottedResult", "Result", "Table",
    "TooLargeError", "amount", "by_rank", "can_merge", "check_file", "check_schema", "check_size", "gather",
    "in_words", "is_lock", "load", "locked", "made_of", "merge", "not_met", "number_of", "parsing",
    "read_json", "read_npz", "read_text", "reading", "restored", "shortened", "to_json",
]  # fmt: skip
