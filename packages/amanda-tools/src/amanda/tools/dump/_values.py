"""Numbers of tensors of any framework, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amanda.tools.dump._arrays import dtype_of
from amanda.tools.dump._entry import Summary
from amanda.tools.mapping import backend_of, local
from amanda.tools.stats import Accumulator

if TYPE_CHECKING:
    from torch import Tensor

Read = Callable[[Any], Any]

SAMPLED = 32
"""Numbers in a sample."""


def summary(tensor: Any) -> Summary:
    """Statistics, and a sample."""
    accumulator = Accumulator(None)
    accumulator.add(tensor)
    read: Read = _SAMPLES.get(backend_of(tensor), _sample)
    numbers = read(tensor)
    real = np.abs(numbers) if np.iscomplexobj(numbers) else numbers
    return Summary(accumulator.statistics(), tuple(real.astype(np.float64).tolist()))


def array(tensor: Any) -> NDArray[Any] | None:
    """A copy of all numbers; None of a tensor that is not one array, or has no numbers."""
    read: Read = _ARRAYS.get(backend_of(tensor), _array)
    found: NDArray[Any] | None = read(tensor)
    return found


def extents(tensor: Any) -> tuple[int, ...]:
    """Shape of what this process holds of a tensor; of a nested one the number of its elements."""
    tensor = local(tensor)
    if getattr(tensor, "is_nested", False):
        return (int(tensor.numel()),)
    return tuple(int(extent) for extent in tensor.shape)


def _positions(size: int) -> list[int]:
    count = min(size, SAMPLED)
    return [i * (size - 1) // max(count - 1, 1) for i in range(count)]


def _sample(tensor: Any) -> NDArray[Any]:
    row = np.asarray(tensor).reshape(-1)
    return row[_positions(row.size)]


def _array(tensor: Any) -> NDArray[Any]:
    return np.array(tensor, order="C")


def _torch_sample(tensor: Tensor) -> NDArray[Any]:
    import torch

    strided = _strided(tensor)
    if strided is None or not strided.numel():
        return np.zeros(0)
    positions = torch.tensor(_positions(strided.numel()), device=strided.device)
    where = torch.unravel_index(positions, strided.shape) if strided.dim() else ()
    return _torch_numbers(strided[where].reshape(-1))


def _torch_array(tensor: Tensor) -> NDArray[Any] | None:
    strided = _strided(tensor)
    return None if strided is None else _torch_numbers(strided)


def _torch_numbers(tensor: Tensor) -> NDArray[Any]:
    import torch

    tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    kind = dtype_of(str(tensor.dtype).removeprefix("torch."))
    if kind.isbuiltin == 1:
        return tensor.clone().numpy()
    integers = {1: torch.uint8, 2: torch.int16}[kind.itemsize]
    return tensor.view(integers).clone().numpy().view(kind)


def _strided(tensor: Tensor) -> Tensor | None:
    """A tensor as one that has all its elements in memory; None where that is not possible."""
    import torch

    if tensor.is_nested or tensor.device.type == "meta":
        return None
    tensor = local(tensor).detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense()).as_subclass(torch.Tensor)


def _tensorflow_sample(tensor: Any) -> NDArray[Any]:
    import tensorflow as tf

    row = tf.reshape(tensor, [-1])
    numbers: NDArray[Any] = tf.gather(row, np.array(_positions(int(row.shape[0])), np.int64)).numpy()
    return numbers


_SAMPLES: dict[str, Read] = {"torch": _torch_sample, "tensorflow": _tensorflow_sample}
_ARRAYS: dict[str, Read] = {"torch": _torch_array, "tensorflow": lambda tensor: _array(tensor.numpy())}
