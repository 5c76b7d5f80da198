"""The fake framework's operators, which leave nodes on the tape; modules and checkpoints that call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from amanda.testing.fake import _autograd
from amanda.testing.fake._autograd import (
    Gradients,
    Number,
    Parameter,
    Tensor,
    apply_elementwise,
    enable_grad,
    is_grad_enabled,
    no_grad,
    record,
)


class Halves(NamedTuple):
    """The pair that `split` gives."""

    first: Tensor
    second: Tensor


def add(input: Tensor, other: Tensor | Number, *, out: Tensor | None = None) -> Tensor:
    """Return input + other, elementwise; with `out`, write the sum there, off the tape."""
    result = apply_elementwise(lambda a, b: a + b, input, other)
    if out is not None:
        out.assign(result)
        return out
    record("AddBackward", [input, other], [result], lambda grads: (grads[0], grads[0]))
    return result


def add_(input: Tensor, other: Tensor | Number) -> Tensor:
    """Add to input in place; an error for a leaf that requires a gradient, while nodes are left."""
    if input.requires_grad and input.is_leaf and is_grad_enabled():
        raise RuntimeError("a leaf that requires a gradient is written in place")
    result = apply_elementwise(lambda a, b: a + b, input, other)
    # The node leads to the tensor's history from before the write.
    inputs = [input.detach() if not input.requires_grad else _alias(input), other]
    input.assign(result)
    record("AddBackward", inputs, [input], lambda grads: (grads[0], grads[0]))
    return input


def _alias(tensor: Tensor) -> Tensor:
    alias = Tensor(tensor.numbers, tensor.shape, tensor.dtype, tensor.requires_grad)
    alias.node, alias.slot = tensor.node, tensor.slot
    return alias


def mul(input: Tensor, other: Tensor | Number) -> Tensor:
    """Return input * other, elementwise."""
    result = apply_elementwise(lambda a, b: a * b, input, other)
    # Off the tape, and copies: what is written in place later must not change the gradient.
    a, b = input.detach(), other.detach() if isinstance(other, Tensor) else other

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        return _product(grad, b), _product(grad, a) if isinstance(b, Tensor) else None

    record("MulBackward", [input, other], [result], backward)
    return result


def muladd(input: Tensor, other: Tensor) -> Tensor:
    """Return input * other + input: an operator that leaves two nodes."""
    product = apply_elementwise(lambda a, b: a * b, input, other)
    a, b = input.detach(), other.detach()

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        return _product(grad, b), _product(grad, a)

    record("MulBackward", [input, other], [product], backward)
    result = apply_elementwise(lambda a, b: a + b, product, input)
    record("AddBackward", [product, input], [result], lambda grads: (grads[0], grads[0]))
    return result


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Return the product of an (n, k) and a (k, m) matrix."""
    result = _matrix_product(input, other)
    a, b = input.detach(), other.detach()

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        return _matrix_product(grad, _transposed(b)), _matrix_product(_transposed(a), grad)

    record("MatmulBackward", [input, other], [result], backward)
    return result


def relu(input: Tensor) -> Tensor:
    """Return the numbers above zero, and zero in the place of the others."""
    result = apply_elementwise(lambda a: a if a > 0 else a * 0, input)
    mask = apply_elementwise(lambda a: 1 if a > 0 else 0, input)
    record("ReluBackward", [input], [result], lambda grads: (_product(grads[0], mask),))
    return result


def split(input: Tensor) -> Halves:
    """Return the two halves along the first axis."""
    middle, row_size = input.shape[0] // 2, len(input.numbers) // input.shape[0]
    trailing, shape = input.shape[1:], input.shape
    halves = Halves(
        Tensor(input.numbers[: middle * row_size], (middle, *trailing), input.dtype),
        Tensor(input.numbers[middle * row_size :], (input.shape[0] - middle, *trailing), input.dtype),
    )
    zeros = [_product(half, 0) for half in halves]

    def backward(grads: Gradients) -> Gradients:
        # A half that nothing reads has no gradient, and counts as zeros.
        first, second = [grad or zero for grad, zero in zip(grads, zeros, strict=True)]
        return (Tensor(first.numbers + second.numbers, shape),)

    record("SplitBackward", [input], halves, backward)
    return halves


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors in a row along the first axis."""
    numbers = [number for tensor in tensors for number in tensor.numbers]
    row_counts = [tensor.shape[0] for tensor in tensors]
    trailing = tensors[0].shape[1:]
    result = Tensor(numbers, (sum_of(row_counts), *trailing), tensors[0].dtype)
    sizes = [len(tensor.numbers) for tensor in tensors]

    def backward(grads: Gradients) -> Gradients:
        """Return for each tensor its rows of the gradient."""
        (grad,) = grads
        assert grad is not None
        starts = [sum_of(sizes[:i]) for i in range(len(sizes))]
        return [
            Tensor(grad.numbers[start : start + size], (row_count, *trailing), grad.dtype)
            for start, size, row_count in zip(starts, sizes, row_counts, strict=True)
        ]

    record("CatBackward", tensors, [result], backward)
    return result


# The operator below takes the name of the builtin.
sum_of = sum


def sum(input: Tensor) -> Tensor:
    """Return the sum of all numbers, as a tensor of no axis."""
    result = Tensor([sum_of(input.numbers)], (), input.dtype)
    shape = input.shape

    def backward(grads: Gradients) -> Gradients:
        """Return the gradient's number for each number of the input."""
        (grad,) = grads
        assert grad is not None
        size = 1
        for extent in shape:
            size *= extent
        return (Tensor(grad.numbers * size, shape, grad.dtype),)

    record("SumBackward", [input], [result], backward)
    return result


def item(input: Tensor) -> Any:
    """Return the only number of a tensor."""
    (number,) = input.numbers
    return number


# An operator that a driver cannot look into, so that reports can be tested.
def opaque(input: Tensor) -> Tensor:
    """Return the same numbers, beyond instrumentation, as a compiled region would."""
    return input.detach()


# An operator with auxiliary state, which is neither returned nor on the tape.
def batch_norm(input: Tensor, running_mean: Tensor) -> Tensor:
    """Return the rows less their mean; write into the running mean, which moves halfway to it."""
    mean = _mean_of_rows(input)
    running_numbers = [(old + new) / 2 for old, new in zip(running_mean.numbers, mean, strict=True)]
    running_mean.assign(Tensor(running_numbers, running_mean.shape, running_mean.dtype))

    def backward(grads: Gradients) -> Gradients:
        (grad,) = grads
        assert grad is not None
        return _less(grad, _mean_of_rows(grad)), None

    result = _less(input, mean)
    record("BatchNormBackward", [input, None], [result], backward)
    return result


OPERATORS = (add, add_, mul, muladd, matmul, relu, split, cat, sum, item, batch_norm, opaque)


def _mean_of_rows(tensor: Tensor) -> list[Number]:
    rows, columns = tensor.shape
    return [sum_of(tensor.numbers[i::columns]) / rows for i in range(columns)]


def _less(tensor: Tensor, row: Sequence[Number]) -> Tensor:
    """Return a matrix with a row subtracted from each of its rows."""
    numbers = [number - row[i % len(row)] for i, number in enumerate(tensor.numbers)]
    return Tensor(numbers, tensor.shape, tensor.dtype)


def _product(tensor: Tensor | None, factor: Tensor | Number) -> Tensor:
    assert tensor is not None
    return apply_elementwise(lambda a, b: a * b, tensor, factor)


def _matrix_product(tensor: Tensor, factor: Tensor) -> Tensor:
    """Return the product of two matrices, off the tape; raise ValueError for extents that do not fit."""
    (n, k), (rows, m) = tensor.shape, factor.shape
    if k != rows:
        raise ValueError(f"shapes {tensor.shape} and {factor.shape} do not multiply")
    a, b = tensor.numbers, factor.numbers
    product = [sum_of(a[i * k + x] * b[x * m + j] for x in range(k)) for i in range(n) for j in range(m)]
    return Tensor(product, (n, m), tensor.dtype)


def _transposed(tensor: Tensor) -> Tensor:
    n, m = tensor.shape
    return Tensor([tensor.numbers[i * m + j] for j in range(m) for i in range(n)], (m, n), tensor.dtype)


class Module:
    """A part of a model: a call runs `forward`; its modules and parameters are its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what a call does."""
        raise NotImplementedError

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module and all modules in it, with their paths."""
        yield prefix, self
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield from value.named_modules(f"{prefix}.{name}" if prefix else name)

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters of this module and of all modules in it."""
        for _, module in self.named_modules():
            for value in vars(module).values():
                if isinstance(value, Parameter):
                    yield value


class Linear(Module):
    """input @ weight, with weight of shape (inputs, outputs)."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """Return the product."""
        return matmul(input, self.weight)


def checkpoint(function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """Return function(input), which keeps nothing for the backward pass and runs again in it."""
    with no_grad():
        output = function(input).detach()
    detached = input.detach()

    def backward(grads: Gradients) -> Gradients:
        """Run the function again, on the tape, and a backward pass of it; return the input's gradient."""
        (grad,) = grads
        assert grad is not None
        # A leaf of its own, whose gradient is that of the checkpoint's input.
        leaf = detached.detach()
        leaf.requires_grad = True
        with enable_grad():
            result = function(leaf)
            _autograd.run_backward([result], [grad])
        return (leaf.grad,)

    record("CheckpointBackward", [input], [output], backward)
    return output
