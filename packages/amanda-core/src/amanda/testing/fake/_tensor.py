"""Tensors: flat lists of numbers with a shape, a type and a place on the tape."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from amanda.testing.fake._autograd import AccumulateGrad, Node

Number: TypeAlias = "float | complex"

_TYPE_CODES = {"float64": "d", "float32": "f", "int64": "q"}


class Tensor:
    """Numbers of one dtype ("float64", "float32", "int64", "complex128") in a shape."""

    requires_grad: bool

    def __init__(
        self,
        numbers: Sequence[Number],
        shape: Sequence[int],
        dtype: str = "float64",
        requires_grad: bool = False,
    ) -> None:
        if len(numbers) != prod(shape):
            raise ValueError(f"{len(numbers)} numbers do not fill shape {tuple(shape)}")
        self.numbers = rounded(numbers, dtype)
        self.shape = tuple(shape)
        self.dtype = dtype
        self.requires_grad = requires_grad
        self.version = 0
        self.grad: Tensor | None = None
        self.node: Node | None = None
        self.slot = 0
        self.accumulator: AccumulateGrad | None = None

    @property
    def is_leaf(self) -> bool:
        """Return True if no operator made it, as far as the tape knows."""
        return self.node is None

    def detach(self) -> Tensor:
        """The same numbers, off the tape."""
        return Tensor(self.numbers, self.shape, self.dtype)

    def astype(self, dtype: str) -> Tensor:
        """The numbers in another type, off the tape."""
        return Tensor(self.numbers, self.shape, dtype)

    def assign(self, tensor: Tensor) -> None:
        """Take the numbers of another tensor of this shape."""
        if tensor.shape != self.shape:
            raise ValueError(f"shape {tensor.shape} does not fit into {self.shape}")
        self.numbers = rounded(tensor.numbers, self.dtype)
        self.version += 1

    def backward(self) -> None:
        """Give every leaf that this number was made from its gradient."""
        _framework()._autograd.run_backward(
            [self], [Tensor([1.0] * len(self.numbers), self.shape, self.dtype)]
        )

    def __add__(self, other: Tensor | Number) -> Tensor:
        return cast(Tensor, _framework()._operators.add(self, other))

    def __mul__(self, other: Tensor | Number) -> Tensor:
        return cast(Tensor, _framework()._operators.mul(self, other))

    def __reduce__(self) -> tuple[Any, ...]:
        options = () if isinstance(self, Parameter) else (self.requires_grad,)
        return type(self), (self.numbers, self.shape, self.dtype, *options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.numbers}, {self.shape}, {self.dtype})"


def _framework() -> Any:
    from amanda.testing import fake  # which imports this module

    return fake


class Parameter(Tensor):
    """A tensor that is trained."""

    def __init__(self, numbers: Sequence[Number], shape: Sequence[int], dtype: str = "float64") -> None:
        super().__init__(numbers, shape, dtype, requires_grad=True)


def tensor(nested: Any, dtype: str = "float64", requires_grad: bool = False) -> Tensor:
    """A tensor of nested lists of numbers."""
    shape: list[int] = []
    level = nested
    while isinstance(level, (list, tuple)):
        shape.append(len(level))
        level = level[0]
    flat = [nested] if not shape else list(nested)
    for _ in shape[1:]:
        flat = [number for row in flat for number in row]
    return Tensor(flat, shape, dtype, requires_grad)


def rounded(numbers: Sequence[Number], dtype: str) -> list[Any]:
    """The numbers as their type holds them."""
    if dtype == "complex128":
        return [complex(number) for number in numbers]
    if dtype == "int64":
        return [int(number.real) for number in numbers]
    return array(_TYPE_CODES[dtype], [number.real for number in numbers]).tolist()


def mapped(function: Callable[..., Number], first: Tensor, *operands: Tensor | Number) -> Tensor:
    """A function of numbers, elementwise; plain numbers go with every element."""
    columns = [
        tensor.numbers if isinstance(tensor, Tensor) else [tensor] * len(first.numbers) for tensor in operands
    ]
    for tensor in operands:
        if isinstance(tensor, Tensor) and tensor.shape != first.shape:
            raise ValueError(f"shapes {first.shape} and {tensor.shape} differ")
    return Tensor(
        [function(*row) for row in zip(first.numbers, *columns, strict=True)], first.shape, first.dtype
    )
