"""Coverage of a run: the ops that it executed, and those of them that the hooks of modules would have seen.

coverage = CoverageTool()
with amanda.apply(coverage):
    model(x).sum().backward()
print(coverage.result.by("phase"))
"""

from amanda.tools.coverage._result import CoverageResult, OpCoverage
from amanda.tools.coverage._tool import CoverageTool

__all__ = ["CoverageResult", "CoverageTool", "OpCoverage"]
