"""Cuts of a model into stages for several devices: even loads, and few bytes between them.

partition = PartitionTool(stages=4)
with amanda.apply(partition):
    model(x).sum().backward()
print(partition.result)
"""

from amanda.tools.partition._cut import PartitionError
from amanda.tools.partition._ipc import ProtectError
from amanda.tools.partition._parts import Part, PartsResult, StageChain
from amanda.tools.partition._protect import ProtectedResult
from amanda.tools.partition._pytorch_pipeline import Pipeline
from amanda.tools.partition._result import Crossing, PartitionResult, Plan, Slot, Stage
from amanda.tools.partition._tool import PartitionTool

__all__ = [
    "Crossing", "Part", "PartitionError", "PartitionResult", "PartitionTool", "PartsResult", "Pipeline",
    "Plan", "ProtectError", "ProtectedResult", "Slot", "Stage", "StageChain",
]  # fmt: skip
