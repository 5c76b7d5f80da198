"""Comparison of two runs: versions, element types, machines, or PyTorch and TensorFlow.

result = diff(old, new, x, control="float64", bisect=True)
print(result.sentence)
"""

from amanda.tools.diff._command import command
from amanda.tools.diff._compare import TOLERANCES
from amanda.tools.diff._comparison import Comparison
from amanda.tools.diff._diff import diff
from amanda.tools.diff._float64 import Float64Tool
from amanda.tools.diff._programs import Command
from amanda.tools.diff._result import DiffResult

__all__ = ["TOLERANCES", "Command", "Comparison", "DiffResult", "Float64Tool", "command", "diff"]
