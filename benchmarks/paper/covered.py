"""Figure 9: how many operators hooks of modules see, of those that Amanda does."""

import sys
from pathlib import Path
from typing import Any

from _measure import QUICK, progress
from _zoo import BERT, INCEPTION, RESNET, VGG

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from hook_coverage import coverage

MODELS = {VGG: "VGG19", RESNET: "ResNet-50", INCEPTION: "Inception-v3", BERT: "BERT-base, eager attention"}
PHASES = ("forward", "backward")


def benchmark() -> dict[str, Any]:
    """Return executions: model -> phase -> of all ops, of those that hooks see, of accumulations."""
    found: dict[str, Any] = {}
    for name in [RESNET] if QUICK else MODELS:
        progress(f"  {name}")
        result = coverage(MODELS[name])
        found[name] = {
            phase: {"all": result.total("calls", phase), "hooks": result.total("whole", phase)}
            for phase in PHASES
        }
        found[name]["backward"]["accumulation"] = sum(
            place.calls for place in result.ops if place.type == "accumulate_grad"
        )
    return {"models": found}
