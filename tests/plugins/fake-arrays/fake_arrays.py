"""The fake framework's ops in the words of StandardMapping, its arithmetic, and where its parameters are."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from autoray import register_function

import amanda
from amanda.testing import fake
from amanda.tools.kit import Tensors
from amanda.tools.weights import ParameterError, ParameterStore, StoredParameter


def standard(context: amanda.OpContext) -> None:
    """Write the keys of StandardMapping."""
    name = context.get_forward_op_type()
    weights = [i for i in range(len(context.get_inputs())) if context.get_variable(i) is not None]
    is_product = name == "matmul" and weights == [1]
    is_backward = context.is_backward()
    context.update(
        type=name, in_place=name.endswith("_"), phase="backward" if is_backward else "forward",
        backward_type=name if is_backward else None, weight_index=1 if is_product else None,
        weight_grad_index=1 if is_product and is_backward else None, layout=None,
        weight_layout="IO" if is_product else None, shape=_shape, dtype=_dtype,
    )  # fmt: skip


def _shape(value: Any) -> tuple[int, ...] | None:
    return value.shape if isinstance(value, fake.Tensor) else None


def _dtype(value: Any) -> str | None:
    return value.dtype if isinstance(value, fake.Tensor) else None


class FakeTensors(Tensors):
    """Tensors of the fake framework, computed with in NumPy."""

    def to_numpy(self, x: Any) -> Any:
        return np.array(x.numbers, x.dtype).reshape(x.shape)

    def copy(self, array: Any) -> Any:
        return np.array(self.to_numpy(array) if isinstance(array, fake.Tensor) else array)

    def cast(self, value: Any, like: Any) -> Any:
        array = np.broadcast_to(np.asarray(value, like.dtype), np.shape(value))
        return fake.Tensor(array.reshape(-1).tolist(), array.shape, like.dtype)

    def kind(self, x: Any) -> tuple[str, str]:
        return x.dtype, ""


def _transpose(x: fake.Tensor, axes: Sequence[int] | None = None) -> fake.Tensor:
    """Return a tensor with its axes in another order, which is the reverse where none is given."""
    array = np.transpose(FakeTensors().to_numpy(x), axes)
    return fake.Tensor(array.reshape(-1).tolist(), array.shape, x.dtype)


# Tools call autoray's `do("transpose", x)`, and the library of the fake tensors has no function of that name.
register_function("amanda", "transpose", _transpose)


class FakeParameters(ParameterStore):
    """Parameters of the fake framework's modules, which ops read as a whole."""

    def read(self, parameter: Any, part: Any) -> Any:
        return parameter.detach()

    def parameters(self, model: Any) -> Iterator[StoredParameter]:
        if not isinstance(model, fake.Module):
            raise ParameterError(f"{type(model).__name__} is no module of the fake framework")
        for parameter in model.parameters():
            yield FakeParameter(self.identity(parameter), parameter)


class FakeParameter(StoredParameter):
    """A parameter of the fake framework."""

    def read(self) -> Any:
        return FakeTensors().to_numpy(self._parameter)

    def write(self, values: Any) -> None:
        self._parameter.assign(FakeTensors().cast(values, self._parameter))
