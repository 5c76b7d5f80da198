"""One sample call, forward and backward, and a record of all that it leaves."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from suite_device import random_state, seed_device
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import amanda

from ._records import Facts, results_facts, tensor_facts, value_facts
from ._variants import Sample, Variant

Pass = Literal["accumulated", "returned", "twice", "written"]
"""A backward pass: into the leaves' `grad`, by `torch.autograd.grad`, or by that and again through it.

"written": none, but the results are written in place.
"""


class Program(torch.nn.Module):
    """The user's program: one call, which has the same ids each time."""

    def forward(self, variant: Variant, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return variant.call(*args, **kwargs)


def record(program: Program, variant: Variant, sample: Sample, backward: Pass) -> Facts | None:
    """What a call and its backward pass leave behind; None for a sample that the variant cannot have."""
    with amanda.disabled():
        prepared = variant.prepared(sample)
        if prepared is None:
            return None
        if backward == "written":
            prepared = tree_map(_without_gradient, prepared)
        inputs = [tensor for tensor in tree_leaves(prepared) if isinstance(tensor, Tensor)]
        trained = [tensor for tensor in inputs if tensor.requires_grad]
        if backward == "accumulated":
            for tensor in trained:
                tensor.retain_grad()
        seed_device(1)
    facts: Facts = {}
    result = None
    try:
        result = program(variant, *prepared)
    except Exception as error:
        facts["error"] = _error_facts(error)
    if backward == "written":
        facts["writes"] = [_written(tensor) for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
    with amanda.disabled():
        facts["random state"] = random_state()
        facts["outputs"] = results_facts(result, inputs)
        facts["inputs"] = [tensor_facts(tensor) for tensor in inputs]
    outputs = [
        tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor) and tensor.requires_grad
    ]
    if backward == "written":
        return facts
    if outputs and trained:
        try:
            gradients = _gradients(outputs, trained, backward)
        except Exception as error:
            facts["backward error"] = _error_facts(error)
        else:
            with amanda.disabled():
                facts["gradients"] = [_gradient_facts(gradient) for gradient in gradients]
    return facts


def _without_gradient(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _written(result: Tensor) -> type[Exception] | None:
    """Write into a result, where torch lets it be; return the class of what torch raises."""
    try:
        result.copy_(result == result.flatten()[0])
    except Exception as error:
        return type(error)
    return None


def _gradients(outputs: list[Tensor], trained: list[Tensor], backward: Pass) -> list[Tensor | None]:
    with amanda.disabled():
        cotangents = [cotangent(output) for output in outputs]
    if backward == "accumulated":
        torch.autograd.backward(outputs, cotangents)
        return [leaf.grad for leaf in trained]
    twice = backward == "twice"
    gradients = torch.autograd.grad(outputs, trained, cotangents, allow_unused=True, create_graph=twice)
    again = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
    if not (twice and again):
        return list(gradients)
    with amanda.disabled():
        cotangents = [cotangent(gradient) for gradient in again]
    return [*gradients, *torch.autograd.grad(again, trained, cotangents, allow_unused=True)]


def cotangent(output: Tensor) -> Tensor:
    """A gradient for an output: random, and the same each time."""
    if output.layout != torch.strided or output.is_nested:
        return output.detach().clone()
    generator = torch.Generator().manual_seed(output.numel())
    return torch.rand(output.shape, dtype=output.dtype, generator=generator).to(output.device)


def _gradient_facts(gradient: Tensor | None) -> Any:
    facts = value_facts(gradient)
    if gradient is not None:
        del facts["version"]  # how often autograd added to it in place
    return facts


def _error_facts(error: Exception) -> list[Any]:
    return [type(error), str(error), getattr(error, "__notes__", [])]
