"""Tensors of selected ops in a folder: summaries, or all their numbers, with an index.

dump = DumpTool("run", outputs="full")
with amanda.apply(dump):
    model(x)
print(dump.result)
for entry in Dump("run"):
    ...
"""

from amanda.tools.dump._reader import Dump, Entry, Op, Summary
from amanda.tools.dump._tool import DumpResult, DumpTool

__all__ = ["Dump", "DumpResult", "DumpTool", "Entry", "Op", "Summary"]
