"""Cuts of a model into stages for several devices: even loads, and few bytes between them.

partition = PartitionTool(stages=4)
with amanda.apply(partition):
    model(x).sum().backward()
print(partition.result)
"""

from amanda.tools.partition._cut import PartitionError, Plan, Slot
from amanda.tools.partition._enclave import ProtectError
from amanda.tools.partition._pytorch_pipeline import Pipeline
from amanda.tools.partition._result import Crossing, Part, PartitionResult, PartsResult, Stage, StageChain
from amanda.tools.partition._tool import PartitionTool, ProtectedResult

__all__ = [
    "Crossing", "Part", "PartitionError", "PartitionResult", "PartitionTool", "PartsResult", "Pipeline",
    "Plan", "ProtectError", "ProtectedResult", "Slot", "Stage", "StageChain",
]  # fmt: skip
