"""Modules of PyTorch: of a function of the user, with inputs and values that a run needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import amanda
from amanda.tools.command import function_of
from amanda.tools.kit import torch_tensors
from amanda.tools.libraries import numpy as np
from amanda.tools.models._subject import Input, ModelError, Request, Subject, library, reshaped

_MEMORY = Path("/proc/meminfo")


def torch_model(request: Request) -> Subject:
    """Return the module that a function of FILE:FUNCTION or MODULE:FUNCTION returns.

    Raises ModelError if the function returns another object, or if no shapes of inputs are known.
    """
    torch = library("torch", request.word)
    with amanda.disabled():  # as in `library_of_models`
        factory = function_of(request.name)
    with torch.device(request.device):
        result = factory(**request.options)
    module, *arguments = result if isinstance(result, (tuple, list)) else (result,)
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"{request.name} returns {type(module).__name__}; it is to return a module, or (module, inputs)"
        )
    if arguments and not request.shapes:
        inputs = [
            Input(f"input {i}", tuple(getattr(value, "shape", ()))) for i, value in enumerate(arguments)
        ]
        return torch_subject(request, module, inputs, lambda: module(*arguments))
    if not request.shapes:
        raise ModelError(
            f"{request.word} does not say what its inputs are: give --input-shape "
            f"{_guess_input_shape(torch, module)}, or have {request.name} return (module, inputs)"
        )
    return with_random_values(request, module, [Input("input", ())], by_name=False)


def library_of_models(name: str, word: str) -> Any:
    """Import a library of models of PyTorch; raise ModelError where it, or PyTorch, is absent or broken."""
    library("torch", word)  # first, since `amanda run` opens its scope there
    with amanda.disabled():  # what a module computes when it is imported is no op of the model
        return library(name, word)


def with_random_values(
    request: Request, module: Any, inputs: Sequence[Input], by_name: bool = True, weights: str = ""
) -> Subject:
    """Return a module with random values for its inputs.  by_name: how they are passed.

    weights: where those of the module come from.
    """
    import torch

    inputs, random = reshaped(inputs, request.shapes), np.random.default_rng(0)
    dtype = next((weight.dtype for weight in module.parameters() if weight.is_floating_point()), None)
    with amanda.disabled():
        values = {entry.name: torch.from_numpy(entry.value(random)).to(request.device) for entry in inputs}
        # Checkpoints are often of half precision, and take images and sound in the same.
        values = {
            name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()
        }
    call = (lambda: module(**values)) if by_name else (lambda: module(*values.values()))
    return torch_subject(request, module, inputs, call, weights)


def torch_subject(
    request: Request, module: Any, inputs: Sequence[Input], call: Callable[[], Any], weights: str = ""
) -> Subject:
    """Return a module that runs forward, or forward and backward from ones at each output."""
    import torch

    module.train(request.backward)

    def run() -> None:
        """Run forward, and backward if that is asked for."""
        with torch.set_grad_enabled(request.backward):
            outputs = torch_tensors([call()], structures=True)
            differentiable = [output for output in outputs if output.requires_grad]
            with amanda.disabled():
                # The first gradient is ours, so tools count no op for it.
                gradients = [torch.ones_like(output) for output in differentiable]
            if request.backward:
                torch.autograd.backward(differentiable, gradients)

    count = sum(parameter.numel() for parameter in module.parameters())
    return Subject(request.word, type(module).__name__, module, inputs, run, count, weights)


RANDOM = "random weights"


def on_device(request: Request, build: Callable[[], Any]) -> Any:
    """Build a module on a device; raise ModelError where its parameters do not fit into the free memory."""
    import torch

    check_memory(request, build)
    with torch.device(request.device):
        return build()


def check_memory(request: Request, build: Callable[[], Any]) -> None:
    """Raise ModelError where the parameters of a model do not fit into the free memory."""
    import torch

    # Built once without memory: a model that does not fit would end the process, not raise.
    with torch.device("meta"), amanda.disabled():
        count = sum(parameter.numel() * parameter.element_size() for parameter in build().parameters())
    if request.device == "cpu" and count > (free := _free_memory()):
        raise ModelError(
            f"the parameters of {request.word} take {count / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; "
            "give --device meta, for shapes alone, or options that make it smaller"
        )


def _free_memory() -> float:
    """Return the bytes of free memory, infinite where they are not known."""
    # Only Linux has the file; elsewhere the operating system decides.
    if not _MEMORY.is_file():
        return float("inf")
    lines = dict(line.split(":") for line in _MEMORY.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def _guess_input_shape(torch: Any, module: Any) -> str:
    """Return a shape that the first linear layer or convolution may take, as text; a pattern without one."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            return f"1,{layer.in_features}"
        if isinstance(layer, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)):
            sizes = [224] * len(layer.kernel_size)
            return ",".join(map(str, (1, layer.in_channels, *sizes)))
    return "SIZE,SIZE,..."
