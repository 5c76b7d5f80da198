"""Torch's own databases of modules, optimizers, autograd functions and custom ops, as programs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import opinfo
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Run = Callable[[], list[Any]]


class Program(NamedTuple):
    """Something to run with and without tools; each run gives the same values."""

    name: str
    run: Run


def modules(every: int = 1) -> Iterator[Program]:
    """Each sample of one module in so many: outputs, gradients and buffers, in training and evaluation."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db[::every]:
        for training in (True, False):
            if not _trains_in(info, torch.float32):
                continue
            sampled = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
            for i, sample in enumerate(sampled):
                run = partial(_run_module, info.module_cls, sample, training)
                yield Program(f"{info.name}[{i}], {'training' if training else 'evaluation'}", run)


def _trains_in(info: Any, dtype: torch.dtype) -> bool:
    return (
        dtype in info.supported_dtypes("cpu") if hasattr(info, "supported_dtypes") else dtype in info.dtypes
    )


def _run_module(kind: type[torch.nn.Module], sample: Any, training: bool) -> list[Any]:
    torch.manual_seed(0)
    arguments = sample.constructor_input
    module = kind(*arguments.args, **arguments.kwargs).train(training)
    inputs = copy.deepcopy((sample.forward_input.args, sample.forward_input.kwargs))
    outputs = tree_leaves(module(*inputs[0], **inputs[1]))
    leaves = [*module.parameters(), *(leaf for leaf in tree_leaves(inputs) if _needs_gradient(leaf))]
    return [*_results(outputs, leaves), *module.buffers()]


def optimizers(every: int = 1) -> Iterator[Program]:
    """Three steps of one optimizer in so many with each of its options: what the parameters come to."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db[::every]:
        for i, sample in enumerate(info.optim_inputs_func(device="cpu")):
            yield Program(f"{info.optim_cls.__name__}[{i}]", partial(_run_optimizer, info, sample.kwargs))


def _run_optimizer(info: Any, options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    parameters = [
        parameter
        for parameter in model.parameters()
        if info.optim_cls is not torch.optim.Muon or parameter.dim() == 2
    ]
    optimizer = info.optim_cls(parameters, **copy.deepcopy(options))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 6).view(2, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return list(model.parameters())


def functions() -> Iterator[Program]:
    """Each sample of every autograd function and custom op."""
    from torch.testing._internal.autograd_function_db import autograd_function_db
    from torch.testing._internal.custom_op_db import custom_op_db

    opinfo.op_db()
    for info in (*autograd_function_db, *custom_op_db):
        for i, sample in enumerate(info.sample_inputs("cpu", torch.float32, requires_grad=True)):
            yield Program(f"{info.name}[{i}]", partial(_run_function, info, sample))


def _run_function(info: Any, sample: Any) -> list[Any]:
    torch.manual_seed(0)
    inputs = copy.deepcopy((sample.input, sample.args, sample.kwargs))
    outputs = tree_leaves(info.op(inputs[0], *inputs[1], **inputs[2]))
    return _results(outputs, [leaf for leaf in tree_leaves(inputs) if _needs_gradient(leaf)])


def _results(outputs: list[Any], leaves: list[Tensor]) -> list[Any]:
    differentiable = [output for output in outputs if _needs_gradient(output)]
    if not (differentiable and leaves):
        return outputs
    cotangents = [torch.ones_like(output) for output in differentiable]
    return [*outputs, *torch.autograd.grad(differentiable, leaves, cotangents, allow_unused=True)]


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
