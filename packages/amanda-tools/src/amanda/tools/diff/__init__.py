"""The first difference of two runs: of versions, dtypes, machines, or of PyTorch and TensorFlow.

result = diff(lambda: old(x).sum().backward(), lambda: new(x).sum().backward())
print(result.first)
"""

from amanda.tools.diff._command import command
from amanda.tools.diff._compare import TOLERANCES
from amanda.tools.diff._diff import diff
from amanda.tools.diff._result import Comparison, DiffResult

__all__ = ["TOLERANCES", "Comparison", "DiffResult", "command", "diff"]
