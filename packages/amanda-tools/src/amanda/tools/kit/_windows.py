"""Windows: how a convolution or a pooling slides over the spatial axes of its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import spatial_axes

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
        total = max((-(-size // self.stride) - 1) * self.stride + self.reach - size, 0)
        less, more = total // 2, total - total // 2
        return (less, more) if self.padding == "same" else (more, less)

    def slices(self, size: int) -> list[slice]:
        """Return for each element of the window the slice of a padded axis that the element reads."""
        last = (self.places(size) - 1) * self.stride
        starts = range(0, self.reach, self.dilation)
        return [slice(start, max(start + last + 1, start), self.stride) for start in starts]

    def positions(self, size: int, count: int) -> NDArray[np.int64]:
        """Return (count, kernel) positions that are read at each place; zeros lie outside of (0, size)."""
        starts = np.arange(count)[:, None] * self.stride - self.pads(size)[0]
        return starts + np.arange(self.kernel) * self.dilation


def windows_of(attributes: Mapping[str, Any], layout: str, kernel: Sequence[int] = ()) -> list[Window]:
    """Return the window along each spatial axis, from an op's attributes in PyTorch, TensorFlow, JAX or ONNX.

    layout: axes of the input, such as "NCHW".  kernel: spatial extents of the weight of a convolution.

    Raises NotImplementedError for a transposed convolution.
    """
    axes = spatial_axes(layout)
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
    if "kernel_size" in attributes and not attributes.get("stride"):
        stride = kernel
    padding = attributes.get("padding", 0)
    pads = [(pad, pad) for pad in _per_axis(0 if isinstance(padding, str) else padding, axes)]
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = [(zeros // 2, zeros - zeros // 2) for zeros in total]
    return list(map(Window, kernel, stride, dilation, pads))


def _tensorflow_windows(
    attributes: Mapping[str, Any], axes: Sequence[int], kernel: Sequence[int]
) -> list[Window]:
    sizes = [attributes["ksize"][i] for i in axes] if attributes.get("ksize") else kernel
    stride = [attributes["strides"][i] for i in axes]
    dilation = [(attributes.get("dilations") or {i: 1})[i] for i in axes]
    explicit = attributes.get("explicit_paddings")
    pads: list[Any] = [tuple(explicit[2 * i : 2 * i + 2]) if explicit else (0, 0) for i in axes]
    if _text(attributes["padding"]) == "SAME":
        pads = ["same"] * len(axes)
    return [
        Window(int(k), int(s), int(d), p) for k, s, d, p in zip(sizes, stride, dilation, pads, strict=True)
    ]


def _jax_windows(attributes: Mapping[str, Any], axes: Sequence[int], kernel: Sequence[int]) -> list[Window]:
    """Return the windows of a convolution, whose attributes are of spatial axes alone, or of a pooling."""
    dilated = [*(attributes.get("lhs_dilation") or ()), *(attributes.get("base_dilation") or ())]
    if any(factor != 1 for factor in dilated):
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
    count = len(axes)
    stride, dilation = (attributes.get(name) or [1] * count for name in ("strides", "dilations"))
    around = attributes.get("pads") or [0] * (2 * count)
    pads: list[Any] = list(zip(around[:count], around[count:], strict=True))
    automatic = _text(attributes.get("auto_pad", ""))
    if automatic.startswith("SAME"):
        pads = ["same" if automatic == "SAME_UPPER" else "same_lower"] * count
    return list(map(Window, kernel or attributes["kernel_shape"], stride, dilation, pads))


def _per_axis(value: Any, axes: Sequence[int]) -> list[int]:
    values = [int(number) for number in value] if isinstance(value, (list, tuple)) else [int(value)]
    return values * len(axes) if len(values) == 1 else values


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
