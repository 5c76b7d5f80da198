"""Axes of tensors: weights with their axes in one order, and windows that slide over spatial axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import spatial_axes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Unfolding", "Window", "canonical", "canonical_extents", "restored", "windows_of"]


class Unfolding(NamedTuple):
    """The way from a weight to its canonical form: reshape to `split`, transpose by `order`, then reshape.

    canonical: the shape at the end.  outputs: number of leading axes of it that are not inputs.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    canonical: tuple[int, ...]
    outputs: int

    @classmethod
    def of(cls, extents: Sequence[int], layout: str) -> Unfolding:
        """Return the way from a weight of these extents to its canonical form.

        Args:
            extents: Shape of the weight.
            layout: As in StandardMapping; further axes in front of it are those of a batch.

        Raises ValueError for fewer axes than the layout has.
        """
        batch_axes = len(extents) - len(layout)  # number of them, in front
        if batch_axes < 0:
            raise ValueError(f"a weight of shape {tuple(extents)} has fewer axes than its layout {layout}")
        axis_of = {letter: batch_axes + i for i, letter in enumerate(layout)}
        window = [axis for letter, axis in axis_of.items() if letter not in "OIM"]
        input_axis = axis_of["I"]
        if "M" not in layout:  # one axis has all outputs, and no axis is split
            order = (*range(batch_axes), axis_of["O"], input_axis, *window)
            return cls(tuple(extents), order, tuple(extents[axis] for axis in order), batch_axes + 1)
        # A WeightLayout knows its groups; a depthwise convolution has one for each channel.
        groups = int(getattr(layout, "groups", extents[input_axis]))
        # With groups, the axis of inputs is one of groups and one of inputs of each.
        split = (*extents[:input_axis], groups, extents[input_axis] // groups, *extents[input_axis + 1 :])
        # Axes behind the one that is split move by one.
        axis_after_split = {axis: axis + (axis > input_axis) for axis in range(len(extents))}
        output_axis = axis_after_split[axis_of["M"]]
        # Groups come ahead of the outputs of each, so that both become one axis, then the inputs of a group.
        moved_window = [axis_after_split[axis] for axis in window]
        order = (*range(batch_axes), input_axis, output_axis, input_axis + 1, *moved_window)
        outputs, inputs_of_group = groups * split[output_axis], split[input_axis + 1]
        canonical = (*extents[:batch_axes], outputs, inputs_of_group, *(extents[axis] for axis in window))
        return cls(split, order, canonical, batch_axes + 1)

    @property
    def transposed(self) -> tuple[int, ...]:
        """The shape between the transposition and the last reshape."""
        return tuple(self.split[axis] for axis in self.order)

    @property
    def inverse_order(self) -> tuple[int, ...]:
        """The inverse permutation of `order`, which undoes the transposition."""
        return tuple(self.order.index(axis) for axis in range(len(self.order)))


def canonical(weight: Any, layout: str | None) -> Any:
    """Return a weight with its axes in the order of output channels, input channels, window.

    Args:
        weight: An array or tensor of any framework.
        layout: As in StandardMapping: O out, I in, M how many channels come of each group of I; None for a
            weight whose axes have no fixed meaning, which is returned as it is.  Further axes in front are
            those of a batch, and stay there.

    Returns:
        (O, I, ...); where there is an M, (groups * M, I / groups, ...), which of a depthwise convolution's
        weight is (I * M, 1, ...).
    """
    if layout is None or _is_canonical(weight.shape, layout):
        return weight
    unfolding = Unfolding.of(weight.shape, layout)
    return _reshape(_transpose(_reshape(weight, unfolding.split), unfolding.order), unfolding.canonical)


def restored(array: Any, layout: str | None, extents: Sequence[int]) -> Any:
    """Return what `canonical` made of a weight of these extents in that weight's own layout.

    Without an M in the layout the array may have other extents, such as those of a larger window.

    Args:
        array: Weight in the order of `canonical`.
        layout: Layout of the weight, as in StandardMapping.
        extents: Shape of the weight in that layout.
    """
    if layout is None or _is_canonical(extents, layout):
        return array
    unfolding = Unfolding.of(extents, layout)
    # Without groups nothing is reshaped, so the array may have other extents than the weight.
    if "M" not in layout:
        return _transpose(array, unfolding.inverse_order)
    split = _transpose(_reshape(array, unfolding.transposed), unfolding.inverse_order)
    return _reshape(split, tuple(extents))


def canonical_extents(extents: Sequence[int], layout: str | None) -> tuple[int, ...]:
    """Return the shape that `canonical` gives to a weight of these extents.

    Args:
        extents: Shape of the weight.
        layout: Its layout, as in StandardMapping; None for axes that have no fixed meaning.
    """
    if layout is None or _is_canonical(extents, layout):
        return tuple(extents)
    return Unfolding.of(extents, layout).canonical


def _is_canonical(extents: Sequence[int], layout: str) -> bool:
    # As most weights of PyTorch: nothing is to be moved.  Too few axes are an error of `Unfolding`.
    return layout.startswith("OI") and "M" not in layout and len(extents) >= len(layout)


def _reshape(array: Any, extents: tuple[int, ...]) -> Any:
    """Return an array in a shape; the array itself if it has this shape."""
    return array if tuple(array.shape) == extents else do("reshape", array, extents)


def _transpose(array: Any, order: tuple[int, ...]) -> Any:
    """Return an array with permuted axes; the array itself if the order is theirs already."""
    return array if order == tuple(range(len(order))) else do("transpose", array, order)


class Window(NamedTuple):
    """The window along one spatial axis, in elements.

    padding: zeros ahead and behind.  "same" and "same_lower" pad so that there are ceil(size / stride)
    places, with an odd zero behind or ahead.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: tuple[int, int] | str = (0, 0)

    @property
    def reach(self) -> int:
        """Elements from the first to the last that are read at one place."""
        return self.dilation * (self.kernel - 1) + 1

    def places(self, size: int) -> int:
        """Return how often the window fits into an axis of a size."""
        return (size + sum(self.pads(size)) - self.reach) // self.stride + 1

    def pads(self, size: int) -> tuple[int, int]:
        """Return the zeros ahead of and behind an axis of a size."""
        if not isinstance(self.padding, str):
            return self.padding
        # ceil(size / stride) places, as TensorFlow's SAME and ONNX' SAME_UPPER have them.
        places = -(-size // self.stride)
        total = max((places - 1) * self.stride + self.reach - size, 0)
        smaller, larger = total // 2, total - total // 2
        return (smaller, larger) if self.padding == "same" else (larger, smaller)

    def slices(self, size: int) -> list[slice]:
        """Return the slice of a padded axis that each element of the window reads; empty where none fits."""
        last_start = (self.places(size) - 1) * self.stride
        # A slice with a stride reads one element of the window at all places at once.
        starts = range(0, self.reach, self.dilation)
        return [slice(start, max(start + last_start + 1, start), self.stride) for start in starts]

    def positions(self, size: int, count: int) -> NDArray[np.int64]:
        """Return (count, kernel) positions that are read at each place; zeros lie outside of (0, size).

        Args:
            size: Extent of the axis without zeros.
            count: Number of places of the window.
        """
        starts = np.arange(count)[:, None] * self.stride - self.pads(size)[0]
        return starts + np.arange(self.kernel) * self.dilation


def windows_of(attributes: Mapping[str, Any], layout: str, kernel: Sequence[int] = ()) -> list[Window]:
    """Return the window along each spatial axis, from an op's attributes in PyTorch, TensorFlow, JAX or ONNX.

    Args:
        attributes: Arguments of the op that are not tensors, by name.
        layout: Axes of the input, such as "NCHW".
        kernel: Spatial extents of the weight of a convolution.

    Raises:
        NotImplementedError: For a transposed convolution.
    """
    axes = spatial_axes(layout)
    # Each framework has attributes of its own names, by which it is told from the others.
    if "window_strides" in attributes:
        return _jax_windows(attributes, axes, kernel)
    if "padding" in attributes and "strides" in attributes:
        return _tensorflow_windows(attributes, axes, kernel)
    if attributes.keys() & {"strides", "kernel_shape", "auto_pad", "pads"}:
        return _onnx_windows(attributes, axes, kernel)
    if attributes.get("transposed"):
        raise NotImplementedError("the window of a transposed convolution")
    kernel = _per_axis(attributes.get("kernel_size", kernel), axes)
    dilation = _per_axis(attributes.get("dilation", 1), axes)
    stride = _per_axis(attributes.get("stride") or 1, axes)
    # PyTorch's poolings move by their own size unless they are given a stride.
    if "kernel_size" in attributes and not attributes.get("stride"):
        stride = kernel
    padding = attributes.get("padding", 0)
    pads = [(pad, pad) for pad in _per_axis(0 if isinstance(padding, str) else padding, axes)]
    if padding == "same":
        # PyTorch's "same" is for a stride of 1, and puts an odd zero behind.
        zero_counts = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        pads = [(zeros // 2, zeros - zeros // 2) for zeros in zero_counts]
    return list(map(Window, kernel, stride, dilation, pads))


def _tensorflow_windows(
    attributes: Mapping[str, Any], axes: Sequence[int], kernel: Sequence[int]
) -> list[Window]:
    """Return the windows of a convolution, or of a pooling, whose `ksize` takes the place of `kernel`."""
    # TensorFlow's attributes have a number for each axis, and two paddings for each.
    sizes = [attributes["ksize"][axis] for axis in axes] if attributes.get("ksize") else kernel
    dilations, paddings = attributes.get("dilations"), attributes.get("explicit_paddings")
    windows = []
    for size, axis in zip(sizes, axes, strict=True):
        dilation = dilations[axis] if dilations else 1
        pads: Any = tuple(paddings[2 * axis : 2 * axis + 2]) if paddings else (0, 0)
        if _text(attributes["padding"]) == "SAME":
            pads = "same"
        windows.append(Window(int(size), int(attributes["strides"][axis]), int(dilation), pads))
    return windows


def _jax_windows(attributes: Mapping[str, Any], axes: Sequence[int], kernel: Sequence[int]) -> list[Window]:
    """Return the windows of a convolution, whose attributes are of spatial axes alone, or of a pooling.

    A pooling has attributes of all axes.  Raises NotImplementedError for a transposed convolution.
    """
    # JAX has no op of transposed convolutions: it dilates the input of a plain one.
    input_dilations = [*(attributes.get("lhs_dilation") or ()), *(attributes.get("base_dilation") or ())]
    if any(dilation != 1 for dilation in input_dilations):
        raise NotImplementedError("the window of a transposed convolution")
    is_pooling = "window_dimensions" in attributes
    names = ("window_strides", "window_dilation" if is_pooling else "rhs_dilation", "padding")
    stride, dilation, padding = (attributes[name] for name in names)
    sizes = attributes["window_dimensions"] if is_pooling else kernel
    return [
        Window(int(sizes[i]), int(stride[i]), int(dilation[i]), (int(padding[i][0]), int(padding[i][1])))
        for i in (axes if is_pooling else range(len(axes)))
    ]


def _onnx_windows(attributes: Mapping[str, Any], axes: Sequence[int], kernel: Sequence[int]) -> list[Window]:
    """Return the windows of a convolution, or of a pooling without `kernel`, which has a `kernel_shape`."""
    count = len(axes)
    stride, dilation = (attributes.get(name) or [1] * count for name in ("strides", "dilations"))
    # ONNX has all paddings ahead first, then all behind.
    all_pads = attributes.get("pads") or [0] * (2 * count)
    pads: list[Any] = list(zip(all_pads[:count], all_pads[count:], strict=True))
    auto_pad = _text(attributes.get("auto_pad", ""))
    if auto_pad.startswith("SAME"):
        pads = ["same" if auto_pad == "SAME_UPPER" else "same_lower"] * count
    return list(map(Window, kernel or attributes["kernel_shape"], stride, dilation, pads))


def _per_axis(value: Any, axes: Sequence[int]) -> list[int]:
    """Return a number for each axis: a single number is that of all axes."""
    values = [int(number) for number in value] if isinstance(value, (list, tuple)) else [int(value)]
    return values * len(axes) if len(values) == 1 else values


def _text(value: Any) -> str:
    """Return text, which TensorFlow and ONNX may give as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
