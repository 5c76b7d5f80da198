"""Parameters of PyTorch, of which ops read parts: views by extents, strides and offset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.tools.kit._holders import Change, Holders, Undo
from amanda.tools.kit._parameters import Held, parameters
from amanda.tools.kit._parts import Form, form_of

if TYPE_CHECKING:
    from torch import Tensor


class Parameters(Holders):
    """Parameters and other leaves of autograd."""

    def is_parameter(self, holder: Tensor) -> bool:
        """Return True for a Parameter, False for another leaf."""
        import torch

        return isinstance(holder, torch.nn.Parameter)

    def held(self, holder: Tensor, weight: Tensor) -> tuple[int, Form | None]:
        """Return the parameter that a weight is or is a view of, and its form there."""
        own = form_of(weight)
        return interceptor.ordinal(holder), None if own == form_of(holder) else own

    def whole(self, holder: Tensor) -> Form:
        """Return the parameter's own form."""
        return form_of(holder)

    def value(self, holder: Tensor, part: Form | None) -> Tensor:
        """Return a view of a part, outside autograd."""
        values = holder.detach()
        return values if part is None else values.as_strided(*part)

    def overlaps(self, part: Form | None, other: Form | None, whole: Form) -> bool:
        """Return True if two parts have elements in common."""
        one, two = part or whole, other or whole
        apart = min(_extent(one), _extent(two)) <= max(one[2], two[2])
        return not apart and bool(self._shared(one, two).any())

    def covers(self, part: Form | None, other: Form | None, whole: Form) -> bool:
        """Return True if a part has every element of another."""
        return part is None or bool(self._shared(part, other or whole).all())

    def _shared(self, part: Form, other: Form) -> Tensor:
        """Return which elements of another part are of a part too."""
        import torch

        ones = torch.ones((), dtype=torch.bool).expand(part[0])
        return self.carried([(ones, part)], other, other, False)

    def carried(
        self, pieces: Sequence[tuple[Tensor, Form | None]], part: Form | None, whole: Form, fill: Any
    ) -> Tensor:
        """Return what a part has of values at other parts, `fill` elsewhere; the last of several counts."""
        import torch

        forms = [whole if form is None else form for form in (part, *(one for _, one in pieces))]
        start = min(form[2] for form in forms)
        first, *others = [(extents, strides, offset - start) for extents, strides, offset in forms]
        with torch.inference_mode(False):
            like = pieces[0][0]
            row = torch.full((max(map(_extent, forms)) - start,), fill, dtype=like.dtype, device=like.device)
            for form, (values, _) in zip(others, pieces, strict=True):
                places = row.as_strided(*form)
                for axis, stride in enumerate(form[1]):
                    if stride == 0:  # of an expanded parameter, of which each element has one place
                        places, values = places.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
                places.copy_(values)
            return row.as_strided(*first).clone()

    def summed(self, gradient: Tensor, part: Form | None) -> Tensor:
        """Return the gradient of a part in which elements of an expanded parameter come once each."""
        axes = [axis for axis, stride in enumerate(part[1] if part else ()) if stride == 0]
        return gradient.sum(axes, keepdim=True).expand_as(gradient) if axes else gradient

    def parameters(self, model: Any) -> Iterator[tuple[int, Change]]:
        """Yield the identity of each parameter of a module or a list, and what changes its values."""
        for held in parameters(model):
            yield held.identity, partial(_change, held)


def _change(held: Held, part: Form | None, changed: Callable[[Any], Any], undo: Undo) -> None:
    held.change(changed, part, undo)


def _extent(form: Form) -> int:
    extents, strides, offset = form
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(extents, strides, strict=True))
