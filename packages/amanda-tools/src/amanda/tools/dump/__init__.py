"""Tensors of selected ops in a folder: summaries, or all their numbers, with an index.

dump = DumpTool("run", outputs="full")
with amanda.apply(dump):
    model(x)
print(dump.result)
for entry in Dump("run"):
    ...
"""

from amanda.tools.dump._entry import Entry, Op, Summary
from amanda.tools.dump._reader import Dump
from amanda.tools.dump._result import DumpResult
from amanda.tools.dump._tool import DumpTool

__all__ = ["Dump", "DumpResult", "DumpTool", "Entry", "Op", "Summary"]
