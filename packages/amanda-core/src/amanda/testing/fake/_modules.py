"""Modules, and checkpoints that compute their function again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from amanda.testing.fake import _autograd, _operators
from amanda.testing.fake._autograd import Gradients, enable_grad, no_grad, record
from amanda.testing.fake._tensor import Parameter, Tensor


class Module:
    """Something that is called, with modules and parameters as attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a call does."""
        raise NotImplementedError

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all in it, by path."""
        yield prefix, self
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield from value.named_modules(f"{prefix}.{name}" if prefix else name)

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of this module and all in it."""
        for _, module in self.named_modules():
            for value in vars(module).values():
                if isinstance(value, Parameter):
                    yield value


class Linear(Module):
    """input @ weight, with weight of shape (inputs, outputs)."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """The product."""
        return _operators.matmul(input, self.weight)


def checkpoint(function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """function(input), which keeps nothing for the backward pass and runs again in it."""
    with no_grad():
        output = function(input).detach()
    detached = input.detach()

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        again = detached.detach()
        again.requires_grad = True
        with enable_grad():
            result = function(again)
            _autograd.run_backward([result], [grad])
        return (again.grad,)

    record("CheckpointBackward", [input], [output], backward)
    return output
