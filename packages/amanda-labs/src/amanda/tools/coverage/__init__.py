"""Coverage of a run: the ops that ran, and those that hooks at leaf modules would see.

coverage = CoverageTool()
with amanda.apply(coverage):
    model(x).sum().backward()
print(coverage.result.by("phase"))
"""

from amanda.tools.coverage._tool import CoverageResult, CoverageTool, OpCoverage

__all__ = ["CoverageResult", "CoverageTool", "OpCoverage"]
