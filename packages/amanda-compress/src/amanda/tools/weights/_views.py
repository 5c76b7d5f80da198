"""Views of parameters that overlap weights: transposed, a part, the whole, or rows that data select."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.weights._parameters import ParameterStore
from amanda.tools.weights._weight import Array, Present, Weight, WeightView
from amanda.tools.weights._weight_input import ParameterSlice

if TYPE_CHECKING:
    from torch import Tensor

    from amanda.tools.weights._tool import WeightTool


TRANSFORMED_PART = "a transform such as vmap has wrapped what an op reads as a part of it"
"""Reason for leaving a view of a parameter unchanged."""


class AliasedWeightView(WeightView):
    """A view of a parameter that overlaps weights in another layout.

    Each element has the state of the weight that holds it; elements of no weight stay unchanged.
    part: layout of the view.  weights: all weights of the parameter.  whole: layout of the parameter.
    """

    def __init__(self, store: ParameterStore, part: Any, whole: Any, weights: Sequence[Weight]) -> None:
        super().__init__()
        self._store, self._part, self._whole, self._weights = store, part, whole, weights
        self._change_counts: list[int] = []  # of the weights, when the state in `_tensors` was cast
        self._coverage: list[bool] = []  # for as many of `weights` as were compared with the view

    @property
    def _ready_weights(self) -> list[Weight]:
        return [weight for weight in self._weights if weight.is_ready]

    @property
    def is_ready(self) -> bool:
        """True once one of the weights has state."""
        return any(weight.is_ready for weight in self._weights)

    def is_of(self, weights: Container[int]) -> bool:
        """Return True if the view overlaps a weight with one of these ids."""
        return any(id(weight) in weights for weight in self._weights)

    def _weights_with_coverage(self) -> Iterator[tuple[Weight, bool]]:
        """Return pairs of each weight of the parameter, and True if the view has every element of it.

        Weights that are new since the last call are compared with the view now.
        """
        # The list of weights grows as ops read further parts; what was compared once is not compared again,
        # since each comparison takes a pass over elements.
        new_weights = self._weights[len(self._coverage) :]
        self._coverage += [self._store.covers(self._part, weight.part, self._whole) for weight in new_weights]
        # Not strict: the list may grow while a caller iterates.
        return zip(self._weights, self._coverage, strict=False)

    def whole_weights(self, value: Any) -> Iterator[tuple[Weight, Present]]:
        """Yield the weights of which the view has every element, each with a function for its value."""
        for weight, is_covered in self._weights_with_coverage():
            if is_covered:
                yield weight, partial(self.value_of, weight, value)

    def gradients(self, gradient: Any) -> Iterator[tuple[Weight, Any]]:
        """Yield the weights, each with its part of the gradient."""
        # An expanded view has several gradients for one element, which autograd would sum.
        gradient = self._store.sum_repeats(gradient, self._part)
        for weight in self._weights:
            yield weight, self.value_of(weight, gradient)

    def value_of(self, weight: Weight, value: Any) -> Array:
        """Return the values of a weight from values of the view, 0 outside the view."""
        return self._transfer([(weight.plain(value), self._part)], weight.part, 0)

    def arrays(self, names: Iterable[str]) -> dict[str, Array]:
        """Return elementwise state, see `Weight.keep_elements`, by name; other state has no form here."""
        arrays = {}
        for name in names:
            weights = [weight for weight in self._ready_weights if name in weight.fills]
            if weights:
                pieces = [(weight[name], weight.part) for weight in weights]
                arrays[name] = self._transfer(pieces, self._part, weights[0].fills[name])
        return arrays

    def tensors_like(self, value: Any, names: Iterable[str]) -> Any:
        """Return state by name in the element type of a tensor, on its device."""
        # The cached tensors are outdated once the state of any weight has changed.
        change_counts = [weight.change_count for weight in self._ready_weights]
        if change_counts != self._change_counts:
            self._tensors.clear()
            self._change_counts = change_counts
        return super().tensors_like(value, names)

    def _transform(self, tool: WeightTool[Any], value: Any, state: Mapping[str, Any]) -> Any:
        """Return what `transform` of an elementwise tool returns, for a value in a function transform.

        None for another tool, which would need whole weights; records the reason.
        """
        if tool.elementwise:
            return super()._transform(tool, value, state)
        for weight in self._ready_weights:
            tool.weights.reasons[f"{weight.type} of {weight.name}"] = TRANSFORMED_PART
        return None

    def transformed(self, tool: WeightTool[Any], value: Any) -> Any:
        """Return what ops read instead of a value; None for no change.

        For a tool that is not elementwise, each weight is transformed as a whole: one of which the view has
        only a part by the present value of its parameter, see `Weight.read`.
        """
        if tool.elementwise:
            return super().transformed(tool, value)
        # The value itself first: elements of no weight stay as they are.
        view_piece = (value, self._part)
        pieces = [view_piece]
        for weight, is_covered in self._weights_with_coverage():
            if not weight.is_ready:
                continue
            # A view with a part of the weight alone cannot give its whole value to a transform that is not
            # elementwise, so that the present value of the parameter stands in.
            value_of_weight = self._transfer([view_piece], weight.part, 0) if is_covered else weight.read()
            result = weight.transformed(tool, value_of_weight)
            if result is not None:
                pieces.append((result, weight.part))
        return self._transfer(pieces, self._part, 0)

    def transformed_gradient(self, tool: WeightTool[Any], gradient: Any) -> Any:
        """Return the gradient of the view; None for no change.

        For a tool that is not elementwise, gradients of weights of which the view has only a part stay.
        """
        if tool.elementwise:
            return super().transformed_gradient(tool, gradient)
        view_piece = (gradient, self._part)
        pieces = [view_piece]
        for weight, is_covered in self._weights_with_coverage():
            # The gradient of a partly visible weight is incomplete, and its transform may mix elements.
            if is_covered and weight.is_ready:
                weight_gradient = self._transfer([view_piece], weight.part, 0)
                result = weight.transformed_gradient(tool, weight_gradient)
                if result is not None:
                    pieces.append((result, weight.part))
        return self._transfer(pieces, self._part, 0)

    def _transfer(self, pieces: Sequence[tuple[Array, Any]], part: Any, fill: Any) -> Array:
        return self._store.transfer(pieces, part, self._whole, fill)


class WeightsOfSamples(WeightView):
    """The weights that the samples of a vmap have in one place of the model, as the models of an ensemble.

    sizes: of the batches, the outermost first.  weights: one for each sample, in the order of the samples.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[Weight]) -> None:
        super().__init__()
        self._sizes, self.weights = tuple(sizes), weights
        self._change_counts: list[int] = []

    @property
    def is_ready(self) -> bool:
        """True once every weight has state."""
        return all(weight.is_ready for weight in self.weights)

    def is_of(self, weights: Container[int]) -> bool:
        """Return True if a sample has a weight with one of these ids."""
        return any(id(weight) in weights for weight in self.weights)

    def whole_weights(self, value: Any) -> Iterator[tuple[Weight, Present]]:
        """Yield the weight of each sample, with a function for its value.

        value: of all samples, with an axis for each batch in front.
        """
        for numbers, weight in zip(np.ndindex(self._sizes), self.weights, strict=True):
            yield weight, partial(value.__getitem__, numbers)

    def arrays(self, names: Iterable[str]) -> dict[str, Array]:
        """Return state by name, with an axis for each batch in front."""
        arrays = {}
        for name in names:
            states = [array for weight in self.weights for array in weight.arrays([name]).values()]
            if states:
                stacked = do("stack", states)
                arrays[name] = do("reshape", stacked, (*self._sizes, *shape(stacked)[1:]))
        return arrays

    def tensors_like(self, value: Any, names: Iterable[str]) -> Mapping[str, Any]:
        """Return state by name in the element type of a tensor, on its device."""
        change_counts = [weight.change_count for weight in self.weights]
        if change_counts != self._change_counts:
            self._tensors.clear()
            self._change_counts = change_counts
        return super().tensors_like(value, names)

    def read_by(self, tool: WeightTool[Any], value: Any) -> Any:
        """Call `on_read` for the weight of each sample; return what the op reads instead, or None."""
        samples = tensors_of(value).samples(value)
        assert samples is not None  # the view was found by them
        with samples.outside():
            for weight, present in self.whole_weights(samples.data):
                tool.on_read(weight, present)
            if not self.is_ready:
                return None
            tensors = self.tensors_like(samples.first, tool.state_names)
        state = {name: samples.wrapped(tensor) for name, tensor in tensors.items()}
        return self.weights[0]._transform(tool, value, state)


class IndexedRows(WeightView):
    """The rows of a parameter that one execution of an op reads, each of which is a weight.

    rows: the view of the whole parameter.  origin: the slice that the op reads.
    """

    def __init__(self, rows: AliasedWeightView, origin: ParameterSlice) -> None:
        super().__init__()
        self._rows, self._holder = rows, origin.holder
        self._select_rows = origin.of  # of any tensor in the parameter's shape

    @property
    def is_ready(self) -> bool:
        """True once one of the rows has state."""
        return self._rows.is_ready

    def whole_weights(self, value: Any) -> Iterator[tuple[Weight, Present]]:
        """Yield every row, also rows that the op does not read.

        value: unused, since it has the selected rows alone.
        """
        # All rows, as state of rows that are not read now would otherwise be missing when a later execution
        # selects them.
        whole = self._holder.detach()
        for weight, _ in self._rows.whole_weights(value):
            yield weight, partial(_row_of, whole, weight.part)

    def transformed(self, tool: WeightTool[Any], value: Tensor) -> Any:
        """Return what the op reads instead of its rows, in their type; None for no change."""
        if not tool.elementwise:
            whole = self._rows.transformed(tool, self._holder.detach())
            return self._select_rows(whole).to(value.dtype)
        whole_state = self._rows.tensors_like(self._holder, tool.state_names)
        state = {name: self._select_rows(tensor).to(value.dtype) for name, tensor in whole_state.items()}
        return tool.transform(value, **state)


def _row_of(whole: Tensor, part: Any) -> Tensor:
    return whole if part is None else whole.as_strided(*part)


def order_of_axes(origin: ParameterSlice, value: Tensor) -> Sequence[int] | None:
    """Return the permutation of a parameter's row axes that gives the last axes of a tensor.

    None if the tensor does not consist of whole rows.
    origin: slice of the parameter that the tensor is; not empty.
    """
    import torch

    holder = origin.holder
    row_extents = holder.shape[1:]
    # Numbered elements show where an op's indexing has put each axis; indices of programs cannot be analysed
    # otherwise.
    element_numbers = origin.of(torch.arange(holder.numel(), device=holder.device).reshape(holder.shape))
    if element_numbers.dim() < len(row_extents):
        return None
    # The last axes are those of a row; all before them count the rows.
    read_rows = element_numbers.reshape(
        -1, *element_numbers.shape[element_numbers.dim() - len(row_extents) :]
    )
    row_size = row_extents.numel()
    # Rows may be selected in any order, and repeatedly: only the order within each row counts.
    row_numbers = read_rows.reshape(len(read_rows), -1)[:, 0] // row_size
    row_starts = (row_numbers * row_size).reshape(-1, *[1] * len(row_extents))
    first_row = torch.arange(row_size, device=holder.device).reshape(row_extents)
    for axes in permutations(range(len(row_extents))):
        permuted = first_row.permute(axes)
        if permuted.shape == read_rows.shape[1:] and torch.equal(read_rows, row_starts + permuted):
            return axes
    return None


def row_layout(layout: str | None, axes: Sequence[int]) -> str | None:
    """Return the layout of a row whose axes an op reads, in `layout`, in another order; None if unknown."""
    if layout is None or len(layout) != len(axes):
        return None
    return "".join(layout[axes.index(axis)] for axis in range(len(axes)))


FindView = Callable[[Any, ParameterSlice | None], WeightView | None]
"""Returns the view that an op reads, from the value and its slice before any tool changed it."""
