"""Tensors of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import amanda
from amanda.tools.kit._tensors import Save, Tensors

if TYPE_CHECKING:
    from torch import Tensor


class TorchTensors(Tensors):
    """Tensors of PyTorch: what is computed stays on their device."""

    def plain(self, x: Tensor) -> Tensor:
        """Return a tensor to compute with: without autograd, in float32 or wider."""
        import torch

        x = x.detach()
        x = x if type(x) is torch.Tensor else x.as_subclass(torch.Tensor)
        return x if x.element_size() >= 4 else x.float()

    def to_numpy(self, x: Any) -> NDArray[Any]:
        """Return an array of NumPy: a copy, since no storage that NumPy has seen can change its size."""
        x = _resolved(x)
        x = x.float() if x.is_floating_point() and x.element_size() < 4 else x
        return np.asarray(x.cpu().clone().numpy())

    def copy(self, array: Any) -> Tensor:
        """Return a contiguous copy to be written into later."""
        import torch

        with torch.inference_mode(False):
            return torch.as_tensor(array).clone(memory_format=torch.contiguous_format)

    def bytes_at(self, x: Tensor, positions: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the bytes of elements: a row for each position in the flattened tensor."""
        import torch

        return _rows(_resolved(x))[torch.from_numpy(positions).to(x.device)].cpu().numpy()

    def with_bytes(self, x: Tensor, positions: NDArray[np.int64], rows: NDArray[np.uint8]) -> Tensor:
        """Return a copy, in the order of memory of `x`, with other bytes in the elements at positions."""
        import torch

        plain = _resolved(x)
        copy = plain.clone(memory_format=torch.contiguous_format)
        chosen = torch.from_numpy(positions).to(x.device)
        _rows(copy)[chosen] = torch.from_numpy(np.array(rows)).to(x.device)
        return torch.empty_like(plain).copy_(copy)

    def memory(self, x: Any) -> tuple[Hashable, Save] | None:
        """Return a key of a dense tensor's storage, and a function that saves all of it."""
        import torch

        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_meta:
            return None
        try:
            storage = x.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a subclass without memory of its own
            return None
        return (storage._cdata, partial(_saved, x)) if storage.nbytes() else None

    def cast(self, value: Any, like: Tensor) -> Tensor:
        """Return a number, an array or a tensor in the element type of a tensor, on its device."""
        import torch

        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # what is kept is used by autograd later
                return torch.as_tensor(value, dtype=like.dtype, device=like.device)
        return torch.as_tensor(value, dtype=like.dtype, device=like.device)

    def beside(self, array: Any, other: Tensor) -> Tensor:
        """Return an array where another one is, in its own element type."""
        import torch

        return torch.as_tensor(array, device=other.device)

    def flat(self, arrays: Sequence[Tensor]) -> Tensor:
        """Return the elements of tensors one after another, where the first tensor is."""
        import torch

        first, *others = (one.to(arrays[0].device).reshape(-1) for one in arrays)
        return torch.cat([first, *others]) if others else first

    def drop_lowest(self, scores: Tensor, count: int) -> Tensor:
        """Return False for the `count` lowest of scores in one row, True for the others.

        Of equal scores those are dropped that `torch.topk` picks, as in torch.nn.utils.prune.  On a CPU topk
        needs six times the memory of the scores, so it is asked only where equal ones leave a choice.
        """
        import torch

        if count and scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
            ordered = scores.clone().numpy()
            ordered.partition(count - 1)
            dropped = scores <= float(ordered[count - 1])
            if int(dropped.count_nonzero()) == count:
                return dropped.logical_not_()
        kept = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
        kept[scores.topk(count, largest=False).indices] = False
        return kept

    def ranks(self, values: Tensor) -> Tensor:
        """Return the rank of each value along the last axis, 0 for the lowest; equal ones in order."""
        return values.argsort(dim=-1, stable=True).argsort(dim=-1)

    def detach(self, x: Tensor) -> Tensor:
        """Return a tensor through which no gradient goes."""
        return x.detach()

    def wide(self, x: Tensor) -> Tensor:
        """Return a tensor in float32, or in its own type if that is wider."""
        return x.float() if x.element_size() < 4 else x

    def round(self, x: Tensor) -> Tensor:
        """Return the nearest integers, half to even."""
        return x.round()

    def floor(self, x: Tensor) -> Tensor:
        """Return the integers below."""
        return x.floor()

    def absolute(self, x: Tensor) -> Tensor:
        """Return magnitudes."""
        return x.abs()

    def where(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return elements of x where the condition holds, else of y."""
        return x.where(condition, y)

    def minimum(self, x: Tensor, y: Any) -> Tensor:
        """Return the smaller of each pair; y may be a number."""
        return x.clamp(max=y)

    def maximum(self, x: Tensor, y: Any) -> Tensor:
        """Return the larger of each pair; y may be a number."""
        return x.clamp(min=y)

    def within(self, value: Tensor, x: Tensor, low: float, high: float) -> Tensor:
        """Return a value, and 0 where x is not between two bounds; comparisons would be slow on the host."""
        import torch

        found: Tensor = torch.ops.aten.hardtanh_backward(value, x, low, high)
        return found

    def sum(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Return the sum over axes."""
        return x.sum(dim=tuple(axes)) if axes else x

    def extent(self, x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the least and the largest elements over axes, without autograd."""
        x = x.detach()
        if len(axes) == x.dim():
            least, most = x.aminmax()
            return least, most
        return x.amin(dim=tuple(axes)), x.amax(dim=tuple(axes))  # aminmax over axes takes 20 times as long

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the same elements in another shape."""
        return x.reshape(tuple(shape))

    def is_dense(self, x: Tensor) -> bool:
        """Return True for a tensor that has elements and stores each of them."""
        import torch

        has_storage = x.layout is torch.strided and not (x.is_nested or x.is_meta or x.is_quantized)
        return has_storage and x.numel() > 0

    def with_gradient(
        self, forward: Callable[..., Any], backward: Callable[..., Any], tensors: Sequence[Tensor],
        collect: Callable[..., None] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return `forward(*tensors)`, whose gradients are `backward(gradient, *tensors)`."""
        result: Tensor = _function().apply(forward, backward, *tensors)
        return result

    def state(self, value: Any, like: Any, trained: bool, dtype: str = "float32") -> Tensor:
        """Return a number, an array or a tensor as state beside a tensor; a Parameter if it is trained."""
        import torch

        with torch.inference_mode(False):
            made = torch.as_tensor(value, dtype=getattr(torch, dtype), device=like.device).detach().clone()
            return torch.nn.Parameter(made) if trained else made

    def update(self, former: Tensor, value: Tensor) -> Tensor:
        """Return a parameter with other values; these where they do not fit."""
        if (former.shape, former.device, former.dtype) != (value.shape, value.device, value.dtype):
            return value
        self.assign(former, value)
        return former

    def assign(self, state: Tensor, value: Any) -> None:
        """Write new values into state."""
        import torch

        with torch.no_grad():
            state.copy_(torch.as_tensor(value, dtype=state.dtype, device=state.device))


def _resolved(x: Tensor) -> Tensor:
    """Return a dense tensor without autograd, with conjugation and negation carried out."""
    import torch

    plain = x.detach().resolve_conj().resolve_neg()
    return plain if plain.layout is torch.strided else plain.to_dense()


def _rows(x: Tensor) -> Tensor:
    """Return the bytes of each element, a view if the tensor is contiguous."""
    import torch

    return x.contiguous().view(-1, 1).view(torch.uint8)


def _saved(x: Tensor) -> Callable[[], None]:
    """Copy the storage of a tensor; return a function that restores it, past autograd's counts of writes."""
    import torch

    with torch.inference_mode(False):
        held = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
    copy = held.clone()

    def restore() -> None:
        if held.untyped_storage().nbytes() == len(copy) and not torch.equal(held, copy):
            held.copy_(copy)

    return restore


@cache
def _function() -> Any:
    import torch

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, forward: Any, backward: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            ctx.given = backward
            return forward(*tensors)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Any) -> Any:
            with amanda.disabled():
                return None, None, *ctx.given(gradient, *ctx.saved_tensors)

    return Function
