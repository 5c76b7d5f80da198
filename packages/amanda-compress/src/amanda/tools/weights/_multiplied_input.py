"""The input of an op that the op's weight multiplies, and that input as a matrix of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import amanda
from amanda.tools.axes import windows_of
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import do, shape
from amanda.tools.mapping import (
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    are_transposed,
    product_of,
    spatial_axes,
)


class MultipliedInput(NamedTuple):
    """The input of an op that the op's weight multiplies.

    position: among the op's inputs.  axis: of the channels, over which the op sums, from the end.
    layout: axes of a convolution's input, such as "NCHW"; None of a matrix product.  attributes: of the op.
    """

    position: int
    axis: int
    layout: str | None
    attributes: Mapping[str, Any]

    def rows(self, x: Any, extents: Sequence[int]) -> Any:
        """Return a value of the input as a matrix for each group of channels: (groups, positions, K).

        The matrix is without autograd, and in float32 or wider.  K counts the elements of the weight for each
        output, in the order of `canonical`.  Of a convolution, a row is what the window reads at one
        position, with zeros for padding.
        extents: of the canonical weight, (outputs, inputs, window).
        """
        # `plain` widens half precision: sums of squares and products over thousands of rows overflow float16.
        plain = tensors_of(x).plain(x)
        if self.layout is None:
            plain = do("moveaxis", plain, self.axis, -1)
            return do("reshape", plain, (1, -1, shape(plain)[-1]))
        # Convolutions also take a single example without an axis for the batch, whose rows are those of a
        # batch of one.
        layout = self.layout if "N" in self.layout else f"N{self.layout}"
        plain = plain if len(shape(plain)) == len(layout) else plain[None]
        # In one order for all layouts: batch, spatial axes, channels.
        plain = do("transpose", plain, (layout.index("N"), *spatial_axes(layout), layout.index("C")))
        _, *sizes, channels = shape(plain)
        windows_and_sizes = list(zip(windows_of(self.attributes, layout, extents[2:]), sizes, strict=True))
        # Padded here and not by an index outside of the input: a product with a mask would turn Inf beside
        # the padding into NaN.
        pads = [window.pads(size) for window, size in windows_and_sizes]
        plain = do("pad", plain, ((0, 0), *pads, (0, 0)))
        # Each spatial axis becomes one of positions, and its window a new axis behind the channels.
        # Axis by axis, a window of 7x7 is 7 + 7 copies of slices.  As 49 slices each copy would touch every
        # cache line of the rows for one element of it, and an index of all positions is slower still.
        for axis, (window, size) in reversed(list(enumerate(windows_and_sizes, 1))):
            slices = [plain[(slice(None),) * axis + (step,)] for step in window.slices(size)]
            window_axis = axis - len(windows_and_sizes) - 1  # from the end
            plain = do("stack", slices, window_axis)
        inputs_of_group = extents[1]
        rows = do("reshape", plain, (-1, channels // inputs_of_group, prod(extents[1:])))
        return do("moveaxis", rows, 1, 0)


def multiplied_input(context: amanda.OpContext, weight_position: int) -> MultipliedInput | None:
    """Return the input that an op multiplies by its weight, of which the position is known.

    None for a transposed convolution, transposed factors, axes of which the layout is not known, and an op of
    another number of factors than two.
    """
    roles, attributes = product_of(context), context.get_attrs()
    if roles is None or weight_position not in roles.factors or len(roles.factors) != 2:
        return None
    # Ops of three factors, such as bilinear ones, are excluded above, so that exactly one other factor is
    # left.
    (position,) = (factor for factor in roles.factors if factor != weight_position)
    rank = len(context["shape"](context.get_inputs()[position]) or ())
    if context["type"] not in MATRIX_PRODUCTS:
        layout: str | None = context["layout"]
        if layout is None or context["type"] not in CONVOLUTIONS:
            return None
        channel_axis = layout.index("C") - len(layout)  # from the end
        return MultipliedInput(position, channel_axis, layout, attributes)
    if "dimension_numbers" in attributes:  # JAX sums over any axis
        contracted_axes, _ = attributes["dimension_numbers"]  # of both factors, and batch axes
        axis, *_ = contracted_axes[position]
        return MultipliedInput(position, axis - rank, layout=None, attributes=attributes)
    if any(are_transposed(attributes)):
        return None
    # With the weight in front (weight @ x) the channels of the input are its rows; a vector has one axis
    # alone.
    is_matrix_behind = weight_position < position and rank > 1
    channel_axis = -2 if is_matrix_behind else -1
    return MultipliedInput(position, channel_axis, layout=None, attributes=attributes)
