"""A parameter in another form than its weights: transposed, a part, the whole, or rows that data select."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

from amanda.tools.weights._parameter_slices import ParameterSlice
from amanda.tools.weights._parameters import ParameterStore
from amanda.tools.weights._weight import Array, Present, Weight, WeightView

if TYPE_CHECKING:
    from torch import Tensor

    from amanda.tools.weights._tool import WeightTool


class AliasedWeightView(WeightView):
    """A form of a parameter that overlaps those in which its weights were met.

    State of elements is that of the weights there; where no weight reaches, elements are left as they are.
    part: the form; weights: those of the parameter; whole: the form of all of it.
    """

    def __init__(self, store: ParameterStore, part: Any, whole: Any, weights: Sequence[Weight]) -> None:
        super().__init__()
        self._store, self._part, self._whole, self._weights = store, part, whole, weights
        self._seen: list[int] = []
        self._covers: list[bool] = []

    @property
    def _ready(self) -> list[Weight]:
        return [one for one in self._weights if one.is_ready]

    @property
    def is_ready(self) -> bool:
        """True once the state of one of the weights is made."""
        return any(one.is_ready for one in self._weights)

    def is_of(self, weights: Container[int]) -> bool:
        """Return True if it is a form of any of these weights, by their ids."""
        return any(id(one) in weights for one in self._weights)

    def _covered(self) -> Iterator[tuple[Weight, bool]]:
        """Yield each weight of the parameter, and True if the form has every element of it."""
        more = self._weights[len(self._covers) :]
        self._covers += [self._store.covers(self._part, one.part, self._whole) for one in more]
        return zip(self._weights, self._covers, strict=False)

    def within(self, value: Any) -> Iterator[tuple[Weight, Present]]:
        """Yield the weights of which it has every element."""
        for one, covered in self._covered():
            if covered:
                yield one, partial(self.value_of, one, value)

    def gradients(self, gradient: Any) -> Iterator[tuple[Weight, Any]]:
        """Yield the weights, each with its part of the gradient."""
        gradient = self._store.sum_repeats(gradient, self._part)
        for one in self._weights:
            yield one, self.value_of(one, gradient)

    def value_of(self, weight: Weight, value: Any) -> Array:
        """Return what a weight has of the values of this form, 0 elsewhere."""
        return self._transfer([(weight.plain(value), self._part)], weight.part, 0)

    def arrays(self, names: Iterable[str]) -> dict[str, Array]:
        """Return state of elements by name, as far as any of the weights keeps it."""
        found = {}
        for name in names:
            kept = [(one, *one.arrays([name]).values()) for one in self._ready if name in one.fills]
            if kept:
                pieces = [(array, one.part) for one, array in kept]
                found[name] = self._transfer(pieces, self._part, kept[0][0].fills[name])
        return found

    def tensors_like(self, value: Any, names: Iterable[str]) -> Any:
        """Return state by name in the element type of a tensor, on its device."""
        seen = [one.changes for one in self._ready]
        if seen != self._seen:
            self._tensors.clear()
            self._seen = seen
        return super().tensors_like(value, names)

    def transformed(self, tool: WeightTool[Any], value: Any) -> Any:
        """Return what ops read instead of a value; None for no change."""
        if tool.elementwise:
            return super().transformed(tool, value)
        pieces = [(value, self._part)]
        for one, covered in self._covered():
            if not one.is_ready:
                continue
            own = self._transfer(pieces[:1], one.part, 0) if covered else one.read()
            made = one.transformed(tool, own)
            pieces += [] if made is None else [(made, one.part)]
        return self._transfer(pieces, self._part, 0)

    def transformed_gradient(self, tool: WeightTool[Any], gradient: Any) -> Any:
        """Return the gradient of the parameter in this form; None for no change."""
        if tool.elementwise:
            return super().transformed_gradient(tool, gradient)
        pieces = [(gradient, self._part)]
        for one, covered in self._covered():
            if covered and one.is_ready:
                made = one.transformed_gradient(tool, self._transfer(pieces[:1], one.part, 0))
                pieces += [] if made is None else [(made, one.part)]
        return self._transfer(pieces, self._part, 0)

    def _transfer(self, pieces: Sequence[tuple[Array, Any]], part: Any, fill: Any) -> Array:
        return self._store.transfer(pieces, part, self._whole, fill)


class IndexedRows(WeightView):
    """The rows of a parameter that one execution of an op reads, each of which is a weight.

    rows: the parameter as a whole.  origin: of what is read.
    """

    def __init__(self, rows: AliasedWeightView, origin: ParameterSlice) -> None:
        super().__init__()
        self._rows, self._holder, self._of = rows, origin.holder, origin.of

    @property
    def is_ready(self) -> bool:
        """True once the state of one of the rows is made."""
        return self._rows.is_ready

    def within(self, value: Any) -> Iterator[tuple[Weight, Present]]:
        """Yield every row, also those that are not selected."""
        whole = self._holder.detach()
        for one, _ in self._rows.within(value):
            yield one, partial(_row, whole, one.part)

    def transformed(self, tool: WeightTool[Any], value: Tensor) -> Any:
        """Return the rows as the op reads them instead; None for no change."""
        if not tool.elementwise:
            return self._of(self._rows.transformed(tool, self._holder.detach())).to(value.dtype)
        state = self._rows.tensors_like(self._holder, tool.state_names)
        return tool.transform(value, **{name: self._of(one).to(value.dtype) for name, one in state.items()})


def _row(whole: Tensor, part: Any) -> Tensor:
    return whole if part is None else whole.as_strided(*part)


def order_of_axes(origin: ParameterSlice, value: Tensor) -> Sequence[int] | None:
    """Return the order in which the last axes of a tensor are those of a parameter's rows; None for none.

    origin: of the tensor, which has elements.
    """
    import torch

    holder = origin.holder
    extents = holder.shape[1:]
    places = origin.of(torch.arange(holder.numel(), device=holder.device).reshape(holder.shape))
    if places.dim() < len(extents):
        return None
    inner = places.reshape(-1, *places.shape[places.dim() - len(extents) :])
    size = extents.numel()
    row = torch.arange(size, device=holder.device).reshape(extents)
    starts = (inner.reshape(len(inner), -1)[:, 0] // size * size).reshape(-1, *[1] * len(extents))
    for axes in permutations(range(len(extents))):
        turned = row.permute(axes)
        if turned.shape == inner.shape[1:] and torch.equal(inner, starts + turned):
            return axes
    return None


def row_layout(layout: str | None, axes: Sequence[int]) -> str | None:
    """Return the layout of a row, of the layout in which an op reads it with its axes in another order."""
    if layout is None or len(layout) != len(axes):
        return None
    return "".join(layout[axes.index(axis)] for axis in range(len(axes)))


Find = Callable[[Any, ParameterSlice | None], WeightView | None]
"""Returns the weight, or the form, that is read, of a value and of its origin before any tool changed it."""
