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
        inputs = [one for one in tree_leaves(prepared) if isinstance(one, Tensor)]
        trained = [one for one in inputs if one.requires_grad]
        if backward == "accumulated":
            for one in trained:
                one.retain_grad()
        seed_device(1)
    left: Facts = {}
    result = None
    try:
        result = program(variant, *prepared)
    except Exception as error:
        left["error"] = _error_facts(error)
    if backward == "written":
        left["writes"] = [_written(one) for one in tree_leaves(result) if isinstance(one, Tensor)]
    with amanda.disabled():
        left["random state"] = random_state()
        left["outputs"] = results_facts(result, inputs)
        left["inputs"] = [tensor_facts(one) for one in inputs]
    made = [one for one in tree_leaves(result) if isinstance(one, Tensor) and one.requires_grad]
    if backward == "written":
        return left
    if made and trained:
        try:
            gradients = _gradients(made, trained, backward)
        except Exception as error:
            left["backward error"] = _error_facts(error)
        else:
            with amanda.disabled():
                left["gradients"] = [_gradient_facts(one) for one in gradients]
    return left


def _without_gradient(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _written(result: Tensor) -> type[Exception] | None:
    """Write into a result, where torch lets it be; return the class of what torch raises."""
    try:
        result.copy_(result == result.flatten()[0])
    except Exception as error:
        return type(error)
    return None


def _gradients(made: list[Tensor], trained: list[Tensor], backward: Pass) -> list[Tensor | None]:
    with amanda.disabled():
        given = [cotangent(one) for one in made]
    if backward == "accumulated":
        torch.autograd.backward(made, given)
        return [one.grad for one in trained]
    twice = backward == "twice"
    gradients = torch.autograd.grad(made, trained, given, allow_unused=True, create_graph=twice)
    again = [one for one in gradients if one is not None and one.requires_grad]
    if not (twice and again):
        return list(gradients)
    with amanda.disabled():
        given = [cotangent(one) for one in again]
    return [*gradients, *torch.autograd.grad(again, trained, given, allow_unused=True)]


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
