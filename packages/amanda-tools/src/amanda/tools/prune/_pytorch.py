"""PyTorch: masks are computed with tensors, where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.tools.kit import Held, parameters
from amanda.tools.mapping import Form, form_of

if TYPE_CHECKING:
    from torch import Tensor

Change = Callable[[Form | None, Callable[[Any], Any]], None]
"""Changes the values of a part of a parameter, or of all of it."""


def plain(weight: Tensor) -> Tensor:
    """A weight as a tensor that masks are computed with: outside autograd, in float32 at least."""
    import torch

    weight = weight.detach()
    weight = weight if type(weight) is torch.Tensor else weight.as_subclass(torch.Tensor)
    return weight if weight.element_size() >= 4 else weight.float()


def as_mask(kept: Any, weight: Tensor) -> Tensor:
    """A mask of 0 and 1 in the weight's own type, on its device."""
    import torch

    with torch.inference_mode(False):
        return torch.as_tensor(kept, device=weight.device).to(weight.dtype)


def row(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of tensors one after another, where the first one is."""
    import torch

    first, *others = (one.to(tensors[0].device).reshape(-1) for one in tensors)
    return torch.cat([first, *others]) if others else first


def lowest_dropped(scores: Tensor, count: int) -> Tensor:
    """Of scores in one row, false for the `count` lowest and true for the others.

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
        return torch.as_tensor(array).clone(memory_format=torch.contiguous_format)


def identity(holder: Tensor) -> int:
    """What names a parameter."""
    return interceptor.ordinal(holder)


def held(holder: Tensor, weight: Tensor) -> tuple[int, Form | None]:
    """What names the parameter that a weight is or is a view of, and which part it is; None for all of it."""
    own = form_of(weight)
    return identity(holder), None if own == form_of(holder) else own


def overlaps(part: Form | None, other: Form | None, whole: Form) -> bool:
    """Whether two parts of a parameter have elements in common."""
    one, two = part or whole, other or whole
    apart = min(_extent(one), _extent(two)) <= max(one[2], two[2])
    return not apart and bool(_shared(one, two).any())


def covers(part: Form | None, other: Form | None, whole: Form) -> bool:
    """Whether a part of a parameter has every element of another one."""
    return part is None or bool(_shared(part, other or whole).all())


def _shared(part: Form, other: Form) -> Tensor:
    """Which elements of another part are of a part too."""
    import torch

    return carried([(torch.ones((), dtype=torch.bool).expand(part[0]), part)], other, other, False)


def carried(
    pieces: Sequence[tuple[Tensor, Form | None]], part: Form | None, whole: Form, fill: Any
) -> Tensor:
    """What a part of a parameter has of values at other parts of it; `fill` where they have none."""
    import torch

    forms = [whole if form is None else form for form in (part, *(one for _, one in pieces))]
    start = min(form[2] for form in forms)
    first, *others = [(extents, strides, offset - start) for extents, strides, offset in forms]
    with torch.inference_mode(False):
        like = pieces[0][0]
        row = torch.full((max(map(_extent, forms)) - start,), fill, dtype=like.dtype, device=like.device)
        for form, (values, _) in zip(others, pieces, strict=True):
            row.as_strided(*form).copy_(values)
        return row.as_strided(*first).clone()


def _extent(form: Form) -> int:
    extents, strides, offset = form
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(extents, strides, strict=True))


def variables(model: Any) -> Iterator[tuple[int, Change]]:
    """The identities of a module's or a list's parameters, each with what changes its value.

    Raises HeldError where there are none.
    """
    for held in parameters(model):
        yield held.identity, partial(_change, held)


def _change(held: Held, part: Form | None, changed: Callable[[Any], Any]) -> None:
    held.change(changed, part)
