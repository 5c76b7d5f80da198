"""The linear layers of a model whose weights a tool has quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize.weights._calibrated import CalibratedWeight
from amanda.tools.quantize.weights._integers import IntegerTool

if TYPE_CHECKING:
    from torch import nn

Layers = Mapping[str, "tuple[nn.Linear, CalibratedWeight]"]

ELSEWHERE = "it is not the whole weight of torch.nn.Linear layers alone"


def linear_layers(model: nn.Module, tool: IntegerTool) -> tuple[Layers, dict[str, str]]:
    """Return linear layers by their path, each with its weight in the tool, and why others are left.

    Layers that share a parameter have the same weight.
    Raises QuantizeError if the tool has quantised no weight of this model.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise QuantizeError(f"a {type(model).__name__} was given; give a torch.nn.Module")
    holders: dict[int, list[tuple[str, Any]]] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((name if own == "weight" else "", module))
    by_path = dict(model.named_parameters(remove_duplicate=False))
    layers, left, met = {}, dict(tool.left), 0
    for weight in tool.weights:
        parameter = by_path.get(weight.path)
        if parameter is None or not weight.is_ready:
            continue
        met += 1
        owners = holders[id(parameter)]
        linear = all(isinstance(one, torch.nn.Linear) for _, one in owners)
        if linear and weight.part is None and weight.shape == parameter.shape:
            layers.update({name: (module, weight) for name, module in owners})
        else:
            left[f"{weight.type} of {weight.module or weight.source}"] = ELSEWHERE
    if not met:
        raise QuantizeError(
            f"{type(tool).__name__} has quantised no weight of this {type(model).__name__}: call the model "
            "in a scope of the tool first"
        )
    return layers, left
