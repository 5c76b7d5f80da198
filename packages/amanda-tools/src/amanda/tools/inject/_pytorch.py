"""Elements of PyTorch's tensors, and which inputs are parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda.tools.inject._elements import Bytes, Elements, Positions

if TYPE_CHECKING:
    from torch import Tensor


class TorchElements(Elements):
    """Dense tensors on any device."""

    def extents(self, value: Any) -> tuple[int, ...] | None:
        """Shape of a strided tensor with memory of its own."""
        import torch

        strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not strided or value.is_meta or value.is_quantized:
            return None
        return tuple(value.shape)

    def read(self, value: Tensor, positions: Positions) -> Bytes:
        """Bytes of the elements at positions in the flattened tensor."""
        import torch

        chosen = torch.from_numpy(positions).to(value.device)
        return _bytes(_plain(value))[chosen].cpu().numpy()

    def replaced(self, value: Tensor, positions: Positions, raw: Bytes) -> Tensor:
        """A copy with these bytes at these positions, in the order of memory that `value` has."""
        import torch

        copy = _plain(value).clone(memory_format=torch.contiguous_format)
        chosen = torch.from_numpy(positions).to(value.device)
        _bytes(copy)[chosen] = torch.from_numpy(np.array(raw)).to(value.device)
        return torch.empty_like(_plain(value)).copy_(copy)

    def as_array(self, value: Tensor) -> NDArray[Any]:
        """The tensor as an array of its own memory."""
        import torch

        plain = _plain(value)
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        try:
            return np.asarray(plain.cpu().clone().numpy())
        except TypeError:  # bfloat16 and the like
            return np.asarray(plain.cpu().double().numpy())

    def from_double(self, numbers: NDArray[np.float64], dtype: str) -> Bytes:
        """Bytes of numbers, as PyTorch rounds them."""
        import torch

        made = torch.from_numpy(np.array(numbers)).to(getattr(torch, dtype))
        return _bytes(made).numpy()

    def to_double(self, raw: Bytes, dtype: str) -> NDArray[np.float64]:
        """The numbers that bytes stand for."""
        import torch

        numbers = torch.from_numpy(np.array(raw)).view(getattr(torch, dtype))[:, 0]
        return np.asarray(numbers.double().numpy())


def _plain(value: Tensor) -> Tensor:
    """Without autograd, and with what views leave for later done."""
    return value.detach().resolve_conj().resolve_neg()


def _bytes(value: Tensor) -> Tensor:
    """The elements as rows of bytes: of the tensor's own memory if it is contiguous."""
    import torch

    return value.contiguous().view(-1, 1).view(torch.uint8)


def describe(context: amanda.OpContext) -> None:
    """Write `elements`, and `parameters`: positions of the inputs that are parameters or views of one."""
    if "elements" in context:
        return
    from torch.nn import Parameter

    context["elements"] = TorchElements()
    context["parameters_read"] = tuple(
        i
        for i, value in enumerate(context.get_inputs())
        if isinstance(value, Parameter) or isinstance(getattr(value, "_base", None), Parameter)
    )
