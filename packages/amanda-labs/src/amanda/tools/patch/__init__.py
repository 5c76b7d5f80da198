"""Interventions at inputs and outputs of modules and ops: save, set, add, scale; sweeps over modules.

clean = PatchTool("model.layers.1")
with amanda.apply(clean):
    model(prompt)
with amanda.apply(PatchTool("model.layers.1", set=clean, positions=-1)):
    model(other)
"""

from amanda.tools.patch._result import Patched, PatchError, PatchResult, PatchSweep, Region
from amanda.tools.patch._sweep import patch_sweep
from amanda.tools.patch._tool import PatchTool

__all__ = ["PatchError", "PatchResult", "PatchSweep", "PatchTool", "Patched", "Region", "patch_sweep"]
