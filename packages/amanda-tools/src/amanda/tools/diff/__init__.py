"""Comparison of two runs: versions, element types, machines, or PyTorch and TensorFlow.

result = diff(old, new, x, control="float64", bisect=True)
print(result.sentence)
"""

from amanda.tools.diff._diff import command, diff
from amanda.tools.diff._errors import TOLERANCES, Comparison
from amanda.tools.diff._recording import Command
from amanda.tools.diff._result import DiffResult
from amanda.tools.diff._tools import Float64Tool

__all__ = ["TOLERANCES", "Command", "Comparison", "DiffResult", "Float64Tool", "command", "diff"]
