"""What a training step leaves behind, as plain values that can be compared between runs."""

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from suite_device import DEVICE, random_state
from torch import nn
from torch.utils._pytree import tree_map

Facts = dict[str, Any]


def observed(
    model: nn.Module,
    inputs: Mapping[str, Any],
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after_step: Callable[[], None] = lambda: None,
    steps: int = 2,
) -> Facts:
    """Train a copy of the model for some steps, each in its own scope; what the steps and the model came to.

    Everything but the step itself runs outside the scope, so that nothing is added to what is seen.
    """
    model = copy.deepcopy(model).to(DEVICE)
    parts = _parts(model)
    facts: Facts = {}
    for number in range(steps):
        model.zero_grad()
        step_inputs = placed(inputs)
        seed()
        with scope():
            outputs = list(tensors_in(model(**step_inputs)))
            weighted_sum(outputs).backward()
        facts |= {
            f"step {number}: {name}": value for name, value in step_facts(model, step_inputs, outputs).items()
        }
        after_step()
    same = [before is after for before, after in zip(parts, _parts(model), strict=False)]
    return {**facts, **model_facts(model), "the same objects": (same, len(_parts(model)))}


def computed(
    model: nn.Module,
    inputs: Mapping[str, Any],
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, torch.Tensor]:
    """Train a copy of the model for two steps, all in one scope; the tensors that these came to, by name."""
    model = copy.deepcopy(model).to(DEVICE)
    with scope():
        for _ in range(2):
            model.zero_grad()
            step_inputs = placed(inputs)
            seed()
            outputs = list(tensors_in(model(**step_inputs)))
            weighted_sum(outputs).backward()
    tensors = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    tensors |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**tensors, **dict(model.named_buffers())}


def apart(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are further apart than rounding takes them, over many layers.

    Kernels round otherwise where a new tensor cannot have the strides of an expanded one.
    """
    if tensors.keys() != expected.keys():
        return sorted(tensors.keys() ^ expected.keys())
    return [name for name, tensor in tensors.items() if not _close(tensor, expected[name])]


def _close(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.equal(tensor, expected)
    finite = expected.isfinite()
    most = float(expected[finite].abs().max()) if finite.any() else 1.0
    rounding = torch.finfo(tensor.dtype).eps * 1000
    return torch.allclose(tensor, expected, rtol=rounding, atol=rounding * most, equal_nan=True)


def nudged(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy of a model with each floating parameter moved to a neighbouring number, by chance."""
    copied, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                is_up = torch.rand(parameter.shape, generator=generator) < 0.5
                ends = torch.where(is_up, float("inf"), float("-inf")).to(parameter.device, parameter.dtype)
                parameter.copy_(torch.nextafter(parameter, ends))
    return copied


def is_within(tensor: torch.Tensor, expected: torch.Tensor, control: torch.Tensor) -> bool:
    """Whether a tensor is at most ten times as far from the expected one as a control is."""
    distance, noise = ((other - expected).abs().max() for other in (tensor, control))
    return bool(distance <= 10 * noise)


def differences(first: Facts, second: Facts) -> list[str]:
    """Names of what is different in two observations."""
    return [name for name in {**first, **second} if name not in first or first[name] != second.get(name)]


def placed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of a model's inputs on the device."""
    return tree_map(
        lambda value: value.to(DEVICE) if isinstance(value, torch.Tensor) else value,
        copy.deepcopy(dict(inputs)),
    )


def seed() -> None:
    """Set every random state that a model may use."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def weighted_sum(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A loss in which each element of every output has a weight of its own."""
    terms = []
    for output in outputs:
        if output.requires_grad:
            value = torch.view_as_real(output) if output.is_complex() else output
            terms.append(
                (
                    value.float() * torch.linspace(-1, 1, value.numel(), device=value.device).view_as(value)
                ).sum()
            )
    return torch.stack(terms).sum()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a model's output, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif is_dataclass(value):
        yield from tensors_in(vars(value))


def step_facts(model: nn.Module, inputs: Mapping[str, Any], outputs: list[torch.Tensor]) -> Facts:
    """Inputs, outputs, gradients, state_dict and random state, to the bit."""
    state = model.state_dict()
    return {
        **{f"input {name}": described(value) for name, value in inputs.items()},
        **{f"output {index}": tensor_facts(output) for index, output in enumerate(outputs)},
        **{f"gradient of {name}": described(p.grad) for name, p in model.named_parameters()},
        "state_dict": [(name, described(value)) for name, value in state.items()],
        "state_dict metadata": [(name, dict(value)) for name, value in state._metadata.items()],  # type: ignore[attr-defined]
        "torch's random state": random_state(),
        "numpy's random state": repr(np.random.get_state()),
        "Python's random state": random.getstate(),
    }


def model_facts(model: nn.Module) -> Facts:
    """Every module and tensor of a model, by name."""
    facts: Facts = {"modules": [name for name, _ in model.named_modules(remove_duplicate=False)]}
    for name, module in model.named_modules():
        facts[f"class of {name}"] = (type(module), type(module).forward)
        facts[f"attributes of {name}"] = {key: described(value) for key, value in vars(module).items()}
        facts[f"order of attributes of {name}"] = list(vars(module))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        facts[f"tensor {name}"] = (tensor_facts(tensor), dir(tensor))
    return facts


def tensor_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that Python can see of a tensor."""
    return (
        type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.device,
        tensor.requires_grad, tensor.is_leaf, tensor.retains_grad, tensor._version,
        getattr(tensor.grad_fn, "name", str)(), sorted(vars(tensor)), described(tensor._backward_hooks),
        described(tensor._post_accumulate_grad_hooks), tensor_bytes(tensor),
    )  # fmt: skip


def tensor_bytes(tensor: torch.Tensor) -> str:
    """A digest of a tensor's elements, which tells every NaN and zero from the others."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha1(flat.view(torch.uint8).cpu().numpy().data, usedforsecurity=False).hexdigest()


def described(value: Any) -> Any:
    """A value that equals that of another copy of the model: containers by content, objects by class."""
    if isinstance(value, torch.Tensor):
        return tensor_facts(value)
    if isinstance(value, Mapping):
        # A number may come from a counter of the process, as the keys of hooks do.
        keys = [type(key) if isinstance(key, int) else described(key) for key in value]
        return type(value), keys, [described(each) for each in value.values()]
    if isinstance(value, (list, tuple)):
        return type(value), [described(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, type)):
        return value if value == value else "nan"
    return type(value), getattr(value, "__qualname__", None)


def _parts(model: nn.Module) -> list[Any]:
    return [*model.modules(), *model.parameters(), *model.buffers()]
