"""PyTorch: masks are computed with tensors, where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.tools.prune._errors import PruneError

if TYPE_CHECKING:
    from torch import Tensor

Part = tuple[Sequence[int], Sequence[int], int] | None
"""Extents, strides and offset of a view; None for all of a tensor."""


def plain(weight: Tensor) -> Tensor:
    """A weight as a tensor that masks are computed with: outside autograd, in float32 at least."""
    weight = weight.detach()
    return weight if weight.element_size() >= 4 else weight.float()


def as_mask(kept: Any, weight: Tensor) -> Tensor:
    """A mask of 0 and 1 in the weight's own type, on its device."""
    import torch

    with torch.inference_mode(False):
        return torch.as_tensor(kept, device=weight.device).to(weight.dtype)


def row(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors one after another, where the first one is."""
    import torch

    return torch.cat([one.to(tensors[0].device).reshape(-1) for one in tensors])


def lowest_dropped(scores: Tensor, count: int) -> Tensor:
    """Of scores in one row, false for the `count` lowest and true for the others.

    Of equal scores those are dropped that `torch.topk` picks, as in torch.nn.utils.prune.
    """
    kept = scores.new_ones(scores.shape).bool()
    kept[scores.topk(count, largest=False).indices] = False
    return kept


def ranks(values: Tensor) -> Tensor:
    """The rank of each value along the last axis, 0 for the lowest; equal ones from the first."""
    return values.argsort(dim=-1, stable=True).argsort(dim=-1)


def like(array: Any, other: Tensor) -> Tensor:
    """An array as a tensor where another is."""
    import torch

    return torch.as_tensor(array, device=other.device)


def numbers(tensor: Any) -> Any:
    """An array of NumPy with the same content."""
    return tensor.cpu().clone().numpy() if hasattr(tensor, "cpu") else tensor


def stored(array: Any) -> Tensor:
    """A copy to be written into later."""
    import torch

    with torch.inference_mode(False):
        return torch.as_tensor(array).clone()


def identity(holder: Tensor) -> int:
    """What names a parameter."""
    return interceptor.ordinal(holder)


def held(holder: Tensor, weight: Tensor) -> tuple[int, Part]:
    """What names the parameter that a weight is or is a view of, and which part it is."""
    whole = (tuple(holder.shape), holder.stride(), int(holder.storage_offset()))
    own = (tuple(weight.shape), weight.stride(), int(weight.storage_offset()))
    return identity(holder), None if own == whole else own


def variables(model: Any) -> Iterator[tuple[int, Callable[[Part, Callable[[Any], Any]], None]]]:
    """The identities of a module's or a list's parameters, each with what changes its value.

    Raises PruneError where there are none.
    """
    import torch

    found: Iterable[Any] = model.parameters() if isinstance(model, torch.nn.Module) else model
    if isinstance(found, torch.Tensor) or not isinstance(found, Iterable):
        raise PruneError(f"{type(model).__name__} has no parameters; give a module, or a list of parameters")
    for parameter in found:
        yield identity(parameter), _changing(parameter)


def _changing(parameter: Tensor) -> Callable[[Part, Callable[[Any], Any]], None]:
    def change(part: Part, changed: Callable[[Any], Any]) -> None:
        import torch

        with torch.no_grad():
            values = parameter if part is None else parameter.as_strided(*part)
            values.copy_(changed(values.detach()))

    return change
