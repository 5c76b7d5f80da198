"""Modules of PyTorch, from any function, with the inputs that they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import amanda
from amanda.tools.command import function_of
from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.models._inputs import Input, ModelError, reshaped
from amanda.tools.models._subject import Subject, library

_MEMORY = Path("/proc/meminfo")


def made(
    word: str, name: str, options: Mapping[str, Any], shapes: Sequence[str], backward: bool, device: str
) -> Subject:
    """Return the module that a function of FILE:FUNCTION or MODULE:FUNCTION returns."""
    torch = library("torch", word)
    factory = function_of(name)
    with torch.device(device):
        result = factory(**options)
    module, *arguments = result if isinstance(result, (tuple, list)) else (result,)
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"{name} returns {type(module).__name__}; it is to return a module, or (module, inputs)"
        )
    if arguments and not shapes:
        inputs = [
            Input(f"input {i}", tuple(getattr(value, "shape", ()))) for i, value in enumerate(arguments)
        ]
        return subject(word, module, inputs, lambda: module(*arguments), backward, device)
    if not shapes:
        raise ModelError(
            f"{word} does not say what its inputs are: give --input-shape {_guess(torch, module)}, "
            f"or have {name} return (module, inputs)"
        )
    inputs = [Input("input", ())]
    return with_values(word, module, reshaped(inputs, shapes), backward, device, by_name=False)


def with_values(
    word: str, module: Any, inputs: Sequence[Input], backward: bool, device: str, by_name: bool = True
) -> Subject:
    """Return a module with random values for its inputs.  by_name: how they are passed."""
    import torch

    random = np.random.default_rng(0)
    with amanda.disabled():
        values = {entry.name: torch.from_numpy(entry.value(random)).to(device) for entry in inputs}
    call = (lambda: module(**values)) if by_name else (lambda: module(*values.values()))
    return subject(word, module, inputs, call, backward, device)


def subject(
    word: str, module: Any, inputs: Sequence[Input], call: Callable[[], Any], backward: bool, device: str
) -> Subject:
    """Return a module that runs forward, or forward and backward from ones at each output."""
    import torch

    module.train(backward)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            outputs = leaves([call()], structures=True)
            tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
            differentiable = [tensor for tensor in tensors if tensor.requires_grad]
            with amanda.disabled():
                gradients = [torch.ones_like(output) for output in differentiable]
            if backward:
                torch.autograd.backward(differentiable, gradients)

    count = sum(parameter.numel() for parameter in module.parameters())
    return Subject(word, type(module).__name__, module, inputs, run, count)


def on_device(word: str, device: str, build: Callable[[], Any]) -> Any:
    """Build a module on a device; raise ModelError where its parameters do not fit into the free memory."""
    import torch

    with torch.device("meta"), amanda.disabled():
        count = sum(parameter.numel() * parameter.element_size() for parameter in build().parameters())
    if device == "cpu" and count > (free := _free()):
        raise ModelError(
            f"the parameters of {word} take {count / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; give "
            "--device meta, for shapes alone, or options that make it smaller"
        )
    with torch.device(device):
        return build()


def _free() -> float:
    """Return the bytes of free memory, infinite where they are not known."""
    if not _MEMORY.is_file():
        return float("inf")
    lines = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def _guess(torch: Any, module: Any) -> str:
    """Return a shape that the first layer may take."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            return f"1,{layer.in_features}"
        if isinstance(layer, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
            sizes = [224] * len(layer.kernel_size)
            return ",".join(map(str, (1, layer.in_channels, *sizes)))
    return "SIZE,SIZE,..."
