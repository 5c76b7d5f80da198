"""The op that makes the first NaN, or Inf, forward or backward, and from what.

finder = NanTool()
with amanda.apply(finder):
    model(x).sum().backward()
print(finder.result)
"""

from amanda.tools.nan._floats import Summary
from amanda.tools.nan._result import Entered, Finding, NanResult
from amanda.tools.nan._tool import NanTool, NotFiniteError

__all__ = ["Entered", "Finding", "NanResult", "NanTool", "NotFiniteError", "Summary"]
