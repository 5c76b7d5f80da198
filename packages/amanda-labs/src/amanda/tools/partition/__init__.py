"""Cuts of a model into stages for several devices: even loads, and few bytes between them.

partition = PartitionTool(stages=4)
with amanda.apply(partition):
    model(x).sum().backward()
print(partition.result)
"""

from amanda.tools.partition._channel import ProtectError
from amanda.tools.partition._cut import PartitionError
from amanda.tools.partition._onnx_run import StageChain
from amanda.tools.partition._parts import Part, PartsResult
from amanda.tools.partition._plan import Plan
from amanda.tools.partition._protect import ProtectedResult
from amanda.tools.partition._pytorch_pipeline import Pipeline
from amanda.tools.partition._result import Crossing, PartitionResult, Stage
from amanda.tools.partition._schedule import Slot
from amanda.tools.partition._tool import PartitionTool

__all__ = [
    "Crossing", "Part", "PartitionError", "PartitionResult", "PartitionTool", "PartsResult", "Pipeline",
    "Plan", "ProtectError", "ProtectedResult", "Slot", "Stage", "StageChain",
]  # fmt: skip
