"""Amanda's conformance suite on Autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest

import autograd
from amanda.drivers.autograd import AutogradDriver
from amanda.testing import DriverTests, Sample


class AutogradSample(Sample):
    """Autograd's tensors, some of its operators, and a tiny model: `amanda.testing.Sample` says more of each."""

    driver = AutogradDriver
    names: ClassVar = {}  # __name__ of the operators that Autograd calls otherwise: {"linear": "matmul"}
    argument_names = ("input", "other")  # of add
    weight_index = 1  # among the inputs of linear
    dtypes = ("float64", "float32", "int64")  # and a complex one, unless the suite lacks "complex"
    relu_backward = "ReluBackward"
    leaf_backward = "AccumulateGrad"
    model_backward_ops = 3
    many_backward_ops = 2

    def recording(self) -> AbstractContextManager[Any]:
        """Context in which Autograd records for autodiff, if it does so on demand."""
        return nullcontext()

    def settle(self) -> None:
        """Wait for what Autograd computes or frees on threads of its own."""

    def tensor(self, values: Any, dtype: Any=None, requires_grad: bool=False) -> Any:
        """A tensor of nested lists of numbers; a leaf.  Under `grad` also one without axes, of a number."""
        raise NotImplementedError

    def parameter(self, values: Sequence[Any]) -> Any:
        """A trained weight, of the kind that tells ops apart."""
        raise NotImplementedError

    def bits(self, tensor: Any) -> bytes:
        """What a tensor holds, bit by bit."""
        raise NotImplementedError

    def numbers(self, tensor: Any) -> list[Any]:
        """What a tensor holds, as a flat list of Python numbers."""
        raise NotImplementedError

    def shape(self, tensor: Any) -> tuple[int, ...]:
        """A tensor's shape."""
        raise NotImplementedError

    def cast(self, tensor: Any, dtype: Any) -> Any:
        """A tensor in another of `dtypes`."""
        raise NotImplementedError

    def overwrite(self, tensor: Any) -> None:
        """Write into a tensor's memory."""
        raise NotImplementedError

    def backward(self, tensor: Any) -> None:
        """Run the backward pass of the sum of a tensor's elements."""
        raise NotImplementedError

    def model(self) -> Any:
        """second(relu(first(x))) for modules `first` and `second`, each one `linear` without bias."""
        raise NotImplementedError

    def module(self, forward: Callable[..., Any]) -> Any:
        """A module whose call is `forward`."""
        raise NotImplementedError

    @property
    def linear(self) -> Callable[..., Any]:
        """linear(x, weight)."""
        raise NotImplementedError

    @property
    def relu(self) -> Callable[..., Any]:
        """relu(x)."""
        raise NotImplementedError

    @property
    def add(self) -> Callable[..., Any]:
        """add(x, y), where y is a tensor or a number; add(x, y, out=tensor)."""
        raise NotImplementedError

    @property
    def add_(self) -> Callable[..., Any]:
        """add_(x, y), in place."""
        raise NotImplementedError

    @property
    def batch_norm(self) -> Callable[..., Any]:
        """batch_norm(x, *statistics), for x of shape (n, 2): an op that updates running statistics."""
        raise NotImplementedError

    def statistics(self) -> Sequence[Any]:
        """New running statistics of two features, for `batch_norm`."""
        raise NotImplementedError

    @property
    def cat(self) -> Callable[..., Any]:
        """cat([x, y])."""
        raise NotImplementedError

    @property
    def pair(self) -> Callable[..., Any]:
        """pair(x): a namedtuple of two tensors, both with gradients."""
        raise NotImplementedError

    @property
    def item(self) -> Callable[..., Any]:
        """item(x): the Python number of a tensor of one element."""
        raise NotImplementedError

    @property
    def many(self) -> Callable[..., Any]:
        """many(x, y), for x and y of one square shape: an op with several backward ops."""
        raise NotImplementedError

    def checkpoint(self, function: Callable[..., Any], tensor: Any) -> Any:
        """function(tensor), computed again in the backward pass."""
        raise NotImplementedError

    def beyond(self) -> None:
        """Run an op that the driver cannot instrument, and reports."""
        raise NotImplementedError


class TestAutogradDriver(DriverTests):
    """The suite on Autograd."""

    # What Autograd cannot do, with the reason: {"in_place": "tensors are immutable"}; its methods above may go.
    lacks: ClassVar = {}
    # What else the driver does not pass: {"test_...": notyet("why")}; `never` where it cannot, `notimpl` where nobody has.
    gaps: ClassVar = {}

    @pytest.fixture
    def sample(self) -> Sample:
        return AutogradSample()
