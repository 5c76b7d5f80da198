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
COMPUTED = "it is computed at each call, so that no parameter holds it"


def linear_layers(model: nn.Module, tool: IntegerTool) -> tuple[Layers, dict[str, str]]:
    """Return linear layers by their path, each with its weight in the tool, and why others are left.

    Layers that share a parameter have the same weight.
    Raises QuantizeError if the tool has quantised no weight of this model, and where `check_model` does.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise QuantizeError(
            f"a {type(model).__name__} was given; give a torch.nn.Module, or the path of an ONNX file (.onnx)"
        )
    if not isinstance(tool, IntegerTool):
        raise QuantizeError(
            f"a {type(tool).__name__} was given for a {type(model).__name__}; give a NearestTool, GPTQTool "
            "or AWQTool, or an ONNX file of the model with a QuantizeTool"
        )
    tool.check_model(model)
    owners: dict[Any, list[tuple[str, Any]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter_name, parameter in module.named_parameters(recurse=False):
            identity = tool.identity_of(parameter, module)
            owners.setdefault(identity, []).append((name, module if parameter_name == "weight" else None))
    layers, skipped, quantised_count = {}, dict(tool.left), 0
    for weight in tool.weights:
        owners_of_weight = owners.get(weight.holder)
        if not weight.is_ready or (owners_of_weight is None and weight.holder is not None):
            continue
        quantised_count += 1
        reader = tool.other_readers.get(weight.holder)
        linear = owners_of_weight is not None and all(
            isinstance(module, torch.nn.Linear) for _, module in owners_of_weight
        )
        if owners_of_weight is not None and linear and weight.part is None and weight.layout == "OI":
            place = f"{weight.type} of {owners_of_weight[0][0]}"
            if reader is not None:
                skipped[place] = reader
            else:
                layers.update({name: (module, weight) for name, module in owners_of_weight})
        else:
            place = f"{weight.type} of {weight.module or weight.source}"
            skipped[place] = COMPUTED if weight.holder is None else ELSEWHERE
    if not quantised_count:
        raise QuantizeError(
            f"{type(tool).__name__} has quantised no weight of this {type(model).__name__}: call the model "
            "in a scope of the tool first"
        )
    return layers, skipped
