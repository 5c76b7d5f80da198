"""The description of a framework by its driver's author, for the conformance suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from amanda.backend import Driver
from amanda.scope.attachment import attachment

Op = Callable[..., Any]


class Sample(ABC):
    """A framework's tensors, a handful of its ops, and a tiny model.

    Ops are properties that look the framework's callable up at each use, so that the suite's own
    lines are the call sites. Tensors support `tensor * number` and `tensor + number`. What a framework
    lacks by the suite's `lacks` needs no method here. Importing the file that the class is in must have no
    other effect.

    driver: the driver under test.
    op_names: `__name__` of the ops for which it differs from the name here.
    argument_names: names of the two inputs of `add` in the framework's schema.
    weight_index: position of the weight among the inputs of `linear`.
    dtypes: two floating types, the wider first (tensors are made in it), an integer, and a complex one where
    tensors can be complex.
    relu_backward, leaf_backward: `__name__` of relu's backward op and of what stores a leaf's gradient.
    model_backward_ops: how many backward ops a step of `model` has at least, without those of leaves.
    many_backward_ops: how many backward ops `many` has at least, without those of leaves.
    lasting_patches: names of the framework's attributes that the driver replaces for longer than a scope: as
    long as something that was instrumented lives.
    """

    driver: ClassVar[type[Driver]]
    op_names: ClassVar[Mapping[str, str]] = MappingProxyType({})
    argument_names: ClassVar[tuple[str, str]] = ("input", "other")
    weight_index: ClassVar[int] = 1
    dtypes: ClassVar[Sequence[Any]]
    relu_backward: ClassVar[str] = "none"
    leaf_backward: ClassVar[str] = "none"
    model_backward_ops: ClassVar[int] = 3
    many_backward_ops: ClassVar[int] = 2
    lasting_patches: ClassVar[Collection[str]] = ()

    # Tests use one name for each op; a framework's own may differ.
    def op_name(self, op: str) -> str:
        """`__name__` of an op."""
        return self.op_names.get(op, op)

    def recording_autodiff(self) -> AbstractContextManager[Any]:
        """Context in which the framework records for autodiff, if it does so on demand; around each test."""
        return nullcontext()

    def wait_for_framework(self) -> None:  # noqa: B027 - most frameworks compute and free where they are called
        """Wait for what the framework computes or frees on threads of its own."""

    @abstractmethod
    def tensor(self, values: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        """A leaf tensor of some numbers.

        Args:
            values: Nested lists of numbers; under `grad` also a number, for a tensor without axes.
            dtype: One of `dtypes`; None for the first.
            requires_grad: Whether the tensor gets a gradient.
        """

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
        """A tensor in another of `dtypes`.

        Args:
            tensor: Tensor of one of `dtypes`.
            dtype: Another of `dtypes`.
        """

    def overwrite(self, tensor: Any) -> None:
        """Write other values into a tensor's memory."""
        self._raise_missing("overwrite", "mutable_tensors")

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
        """Run the backward pass of the sum of a tensor's elements; do nothing where gradients are lacking."""

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
        """add(x, y), where y is a tensor or a number; add(x, y, out=tensor)."""

    @property
    def add_(self) -> Op:
        """add_(x, y), in place."""
        self._raise_missing("add_", "in_place")

    @property
    def batch_norm(self) -> Op:
        """batch_norm(x, *statistics), for x of shape (n, 2): an op that updates running statistics."""
        self._raise_missing("batch_norm", "auxiliary_state")

    def running_statistics(self) -> Sequence[Any]:
        """New running statistics of two features, for `batch_norm`."""
        self._raise_missing("running_statistics", "auxiliary_state")

    @property
    @abstractmethod
    def cat(self) -> Op:
        """cat([x, y])."""

    @property
    @abstractmethod
    def pair(self) -> Op:
        """pair(x): a namedtuple of two differentiable tensors."""

    @property
    def item(self) -> Op:
        """item(x): the Python number of a tensor of one element."""
        self._raise_missing("item", "numbers")

    @property
    @abstractmethod
    def many(self) -> Op:
        """many(x, y), for x and y of one square shape: an op with several backward ops."""

    def checkpoint(self, function: Op, tensor: Any) -> Any:
        """function(tensor), computed again in the backward pass.

        Args:
            function: Function of one tensor.
            tensor: Argument of the function.
        """
        self._raise_missing("checkpoint", "checkpoints")

    def vmap(self, function: Op) -> Op:
        """Return `function` of a tensor, mapped over the first axis of a tensor."""
        self._raise_missing("vmap", "vmap")

    def grad(self, function: Op) -> Op:
        """Return the gradient of a function of a tensor without axes that gives such a tensor."""
        self._raise_missing("grad", "grad")

    def jvp(self, function: Op) -> Op:
        """Return the function of a tensor and its tangent that gives the tangent of `function` there."""
        self._raise_missing("jvp", "jvp")

    @abstractmethod
    def run_uninstrumentable_op(self) -> None:
        """Run an op that the driver cannot instrument, and reports."""

    def _raise_missing(self, method: str, capability: str) -> NoReturn:
        """Raise NotImplementedError for a method that a framework with this capability has to have."""
        raise NotImplementedError(
            f"{type(self).__name__} has no {method}; write it, or declare in the suite why there is none: "
            f'lacks = {{"{capability}": "reason"}}'
        )


@contextmanager
def attached(driver: type[Driver]) -> Iterator[None]:
    """Attach the driver in scopes that open in this context, as if a distribution registered it.

    Within another such context it does nothing.
    """
    if driver in attachment.guests:  # nested, as where a fixture and a test both attach it
        yield
        return
    attachment.guests.append(driver)
    try:
        yield
    finally:
        attachment.guests.remove(driver)
