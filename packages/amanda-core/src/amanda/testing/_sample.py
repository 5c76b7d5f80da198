"""The description of a framework by its driver's author, for the conformance suite to run on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from amanda.backend import Driver

Op = Callable[..., Any]


class Sample(ABC):
    """A framework's tensors, a handful of its ops, and a tiny model.

    Ops are properties that look the framework's callable up at each use, so that the suite's own
    lines are the call sites. Tensors support `tensor * number` and `tensor + number`, and can be
    referenced weakly. Importing the file that the class is in must have no other effect.

    driver: the driver under test.
    names: `__name__` of the ops for which it differs from the name here.
    weight_index: position of the weight among the inputs of `linear`.
    dtypes: two floating types, the wider first (tensors are made in it), an integer and a complex one.
    relu_backward, leaf_backward: `__name__` of relu's backward op and of what stores a leaf's gradient.
    outlive: names of the framework's attributes that the driver replaces for longer than a scope: as long
    as something that was instrumented lives.
    """

    driver: ClassVar[type[Driver]]
    names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    weight_index: ClassVar[int] = 1
    dtypes: ClassVar[tuple[Any, Any, Any, Any]]
    relu_backward: ClassVar[str]
    leaf_backward: ClassVar[str]
    outlive: ClassVar[Collection[str]] = ()

    def name(self, op: str) -> str:
        """`__name__` of an op."""
        return self.names.get(op, op)

    @abstractmethod
    def tensor(self, values: Sequence[Any], dtype: Any = None, requires_grad: bool = False) -> Any:
        """A tensor of nested lists of numbers; a leaf."""

    @abstractmethod
    def parameter(self, values: Sequence[Any]) -> Any:
        """A trained weight, of the kind that tells ops apart."""

    @abstractmethod
    def bits(self, tensor: Any) -> bytes:
        """Return what a tensor holds, bit by bit."""

    @abstractmethod
    def numbers(self, tensor: Any) -> list[Any]:
        """Return what a tensor holds, as a flat list of Python numbers."""

    @abstractmethod
    def shape(self, tensor: Any) -> tuple[int, ...]:
        """A tensor's shape."""

    @abstractmethod
    def cast(self, tensor: Any, dtype: Any) -> Any:
        """A tensor in another of `dtypes`."""

    @abstractmethod
    def overwrite(self, tensor: Any) -> None:
        """Write into a tensor's memory."""

    def dtype(self, tensor: Any) -> Any:
        """A tensor's dtype."""
        return tensor.dtype

    def device(self, tensor: Any) -> str:
        """A tensor's device, in the framework's words."""
        return str(getattr(tensor, "device", ""))

    def gradient(self, tensor: Any) -> Any:
        """The gradient that a leaf has got; None where there is none."""
        return tensor.grad

    @abstractmethod
    def backward(self, tensor: Any) -> None:
        """Run the backward pass of the sum of a tensor's elements."""

    @abstractmethod
    def model(self) -> Any:
        """second(relu(first(x))) for modules `first` and `second`, each one `linear` without bias.

        first.weight and second.weight are square, 3 by 3, the same in every model that is made.
        """

    @abstractmethod
    def module(self, forward: Op) -> Any:
        """A module whose call is `forward`."""

    def input(self) -> Any:
        """An example input of the model: (2, 3)."""
        return self.tensor([[0.5, -1.25, 2.0], [1.5, 0.75, -0.375]])

    @property
    @abstractmethod
    def linear(self) -> Op:
        """linear(x, weight)."""

    @property
    @abstractmethod
    def relu(self) -> Op:
        """relu(x)."""

    @property
    @abstractmethod
    def add(self) -> Op:
        """add(x, y, out=tensor), whose inputs are named `input`, `other`, `out`."""

    @property
    @abstractmethod
    def add_(self) -> Op:
        """add_(x, y), in place."""

    @property
    @abstractmethod
    def cat(self) -> Op:
        """cat([x, y])."""

    @property
    @abstractmethod
    def pair(self) -> Op:
        """pair(x): a namedtuple of two tensors, both with gradients."""

    @property
    @abstractmethod
    def item(self) -> Op:
        """item(x): the Python number of a tensor of one element."""

    @property
    @abstractmethod
    def many(self) -> Op:
        """many(x, y), for x and y of one square shape: an op with several backward ops."""

    @abstractmethod
    def checkpoint(self, function: Op, tensor: Any) -> Any:
        """function(tensor), computed again in the backward pass."""

    @abstractmethod
    def beyond(self) -> None:
        """Run an op that the driver cannot instrument, and reports."""
