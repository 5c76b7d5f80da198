"""Print, as JSON, what TorchLens has of two models. It leaves torch changed, so this is a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torchlens
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import models


def nodes(model: nn.Module, given: Tensor) -> list[tuple[str, tuple[int, ...], list[int | None]]]:
    """Of each op: the function's name, the extents of its output, and the ops that made its inputs."""
    with torch.no_grad():
        traced: Any = torchlens.trace(model.eval(), given)
    order = [op for op in traced.layer_list if op.is_compute_op]
    position: dict[str, int | None] = {op.layer_label: i for i, op in enumerate(order)}
    position["input_1"] = None
    return [
        (op.func_name, op.shape, [position[one] for one in op.parents if one in position]) for op in order
    ]


if __name__ == "__main__":
    found = {
        "resnet50": nodes(models.resnet50(), torch.rand(1, 3, 32, 32)),
        "bert": nodes(models.bert(**json.loads(sys.argv[1])), torch.randint(0, 99, (2, 7))),
    }
    sys.stdout.write(json.dumps(found))
