"""Functions of torch.func around a call of the operator database, alone and one within the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, func, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ._tools import Watch

Function = Callable[..., tuple[Tensor, ...]]
"""A function of tensors that returns tensors, so that transforms of it can be nested in any order."""

Transform = Callable[[Function], Function]


class Applied:
    """A call of the database's as transforms make it; the types of ops that a tool sees within each call.

    transforms: the outermost first.
    """

    def __init__(self, call: Callable[..., Any], transforms: list[str], watch: Watch | None = None) -> None:
        self.calls: list[list[str]] = []
        self._call, self._transforms, self._watch = call, transforms, watch

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Call the transformed function of the arguments that are tensors with numbers."""
        leaves, form = tree_flatten((args, kwargs))
        positions = _positions(leaves)

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            filled = list(leaves)
            for position, tensor in zip(positions, tensors, strict=True):
                filled[position] = tensor
            filled_args, filled_kwargs = tree_unflatten(filled, form)
            return _tensors(self._seen(filled_args, filled_kwargs))

        for name in reversed(self._transforms):
            function = TRANSFORMS[name](function)
        return function(*(leaves[position] for position in positions))

    def _seen(self, args: Any, kwargs: Any) -> Any:
        """Make the call, and note what the tool sees of it."""
        start = len(self._watch.types) if self._watch else 0
        try:
            return self._call(*args, **kwargs)
        finally:
            self.calls.append(self._watch.types[start:] if self._watch else [])


def _positions(leaves: list[Any]) -> list[int]:
    """Positions of the tensors that are transformed: those of floating type, else all that are plain."""
    plain = [
        i
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested
    ]
    return [i for i in plain if _is_differentiable(leaves[i])] or plain


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))


def _differentiable(function: Function) -> Function:
    return lambda *tensors: tuple(filter(_is_differentiable, function(*tensors)))


def _loss(function: Function) -> Callable[..., Any]:
    """Return a function with one real number, to which each result of a function contributes."""

    def loss(*tensors: Tensor) -> Any:
        results = _differentiable(function)(*tensors)
        return sum((each.real + each.imag if each.is_complex() else each).sum() for each in results)

    return loss


def _over_samples(function: Function) -> Function:
    """Map a function over two samples, whose numbers differ by a factor."""

    def batched(*tensors: Tensor) -> tuple[Tensor, ...]:
        samples = [torch.stack([each, 0.75 * each if _is_differentiable(each) else each]) for each in tensors]
        return _tensors(func.vmap(function, randomness="different")(*samples))

    return batched


def _in_every_argument(
    derivative: Callable[..., Any], of: Callable[[Function], Callable[..., Any]] = _differentiable
) -> Transform:
    """Return a transform to the derivative of a function by each of its tensors."""
    return lambda function: (
        lambda *tensors: _tensors(derivative(of(function), argnums=tuple(range(len(tensors))))(*tensors))
    )


def _vjp(function: Function) -> Function:
    def pulled_back(*tensors: Tensor) -> tuple[Tensor, ...]:
        results, pull_back = func.vjp(_differentiable(function), *tensors)
        return _tensors((results, pull_back(tuple(map(torch.ones_like, results)))))

    return pulled_back


def _jvp(function: Function) -> Function:
    return lambda *tensors: _tensors(
        func.jvp(_differentiable(function), tensors, tuple(map(torch.ones_like, tensors)))
    )


def _linearize(function: Function) -> Function:
    def linear(*tensors: Tensor) -> tuple[Tensor, ...]:
        results, push_forward = func.linearize(_differentiable(function), *tensors)
        return _tensors((results, push_forward(*map(torch.ones_like, tensors))))

    return linear


class Holder(nn.Module):
    """A module that computes a function of its parameters, or of its buffers if these are integers."""

    def __init__(self, function: Function, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.function, self.count = function, len(tensors)
        for i, tensor in enumerate(tensors):
            if _is_differentiable(tensor):
                self.register_parameter(
                    f"tensor{i}", nn.Parameter(torch.zeros(tensor.shape, dtype=tensor.dtype))
                )
            else:
                self.register_buffer(f"tensor{i}", torch.zeros(tensor.shape, dtype=tensor.dtype))

    def forward(self) -> tuple[Tensor, ...]:
        return self.function(*(getattr(self, f"tensor{i}") for i in range(self.count)))


def _functional_call(function: Function) -> Function:
    def called(*tensors: Tensor) -> tuple[Tensor, ...]:
        named = {f"tensor{i}": tensor for i, tensor in enumerate(tensors)}
        return _tensors(func.functional_call(Holder(function, tensors), named, ()))

    return called


def _stack_module_state(function: Function) -> Function:
    """Compute an ensemble of two: the tensors are added to states that are zero."""

    def ensemble(*tensors: Tensor) -> tuple[Tensor, ...]:
        modules = [Holder(function, tensors) for _ in range(2)]
        parameters, buffers = func.stack_module_state(modules)
        stacked = {
            name: state + tensors[int(name.removeprefix("tensor"))]
            for name, state in {**parameters, **buffers}.items()
        }
        call = partial(func.functional_call, modules[0], args=())
        return _tensors(func.vmap(call, randomness="different")(stacked))

    return ensemble


def _without_batch_norm(function: Function) -> Function:
    """Compute a function, then normalise its results by a module whose statistics no batch changes."""

    def normalised(*tensors: Tensor) -> tuple[Tensor, ...]:
        norm = func.replace_all_batch_norm_modules_(nn.BatchNorm1d(2, affine=False))
        results = [each.reshape(1, 1, -1) for each in function(*tensors) if each.dtype == torch.float64]
        # With memory for each element, as an equal new value has: sums over others are rounded otherwise.
        return tuple(norm(each.expand(2, 2, -1).contiguous()) for each in results)

    return normalised


def _unwrapped(function: Function) -> Function:
    """Compute a function of all samples at once within vmap."""

    def within(*tensors: Tensor) -> tuple[Tensor, ...]:
        return function(*map(func.debug_unwrap, tensors))

    return lambda *tensors: _tensors(func.vmap(within, out_dims=None, randomness="same")(*tensors))


def _rearranged(function: Function) -> Function:
    return lambda *tensors: tuple(
        func.rearrange(each, "... -> (...)") if each.dim() else each for each in function(*tensors)
    )


TRANSFORMS: dict[str, Transform] = {
    "vmap": _over_samples,
    "grad": _in_every_argument(func.grad, _loss),
    "grad_and_value": _in_every_argument(func.grad_and_value, _loss),
    "vjp": _vjp,
    "jvp": _jvp,
    "jacrev": _in_every_argument(func.jacrev),
    "jacfwd": _in_every_argument(partial(func.jacfwd, randomness="same")),
    "hessian": _in_every_argument(func.hessian, _loss),
    "linearize": _linearize,
    "functionalize": lambda function: lambda *tensors: _tensors(func.functionalize(function)(*tensors)),
    "functional_call": _functional_call,
    "stack_module_state": _stack_module_state,
    "replace_all_batch_norm_modules_": _without_batch_norm,
    "debug_unwrap": _unwrapped,
    "rearrange": _rearranged,
}
"""How each function of torch.func makes another function of one."""

RECORDED_OR_REPLACED = frozenset({"linearize", "functionalize"})
"""Transforms that record or replace the ops of a function, which the report names: no tool sees them."""

_NOT_NESTED = {
    *RECORDED_OR_REPLACED,
    *("debug_unwrap", "rearrange", "replace_all_batch_norm_modules_"),
}
NESTED = tuple(name for name in TRANSFORMS if name not in _NOT_NESTED)
"""Transforms that are tried within each other."""
