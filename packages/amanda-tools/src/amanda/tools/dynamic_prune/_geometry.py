"""Which positions a convolution reads for those that it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amanda.tools.dynamic_prune._math import framework, indicator, stop

Size = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Extents of a convolution over height and width.

    padding: rows or columns ahead and behind; None for TensorFlow's "SAME", which goes by the size.
    """

    kernel: Size
    stride: Size
    dilation: Size
    padding: tuple[Size, Size] | None

    @property
    def is_pointwise(self) -> bool:
        """True if each position of the output is computed from one position of the input."""
        pads = self.padding in (None, ((0, 0), (0, 0)))
        return self.kernel == self.stride == (1, 1) and pads

    def given(self, size: Size) -> Size:
        """The size of what it gives for an input of this size."""
        pads = self.pads(size)
        return _each(lambda i: (size[i] + sum(pads[i]) - self._reach(i)) // self.stride[i] + 1)

    def pads(self, size: Size) -> tuple[Size, Size]:
        """Rows and columns of zeros ahead and behind, for an input of this size."""
        if self.padding is not None:
            return self.padding
        total = _each(
            lambda i: max((-(-size[i] // self.stride[i]) - 1) * self.stride[i] + self._reach(i) - size[i], 0)
        )
        return tuple((one // 2, one - one // 2) for one in total)  # type: ignore[return-value]

    def needed(self, mask: Any, size: Size) -> Any:
        """0/1 of the input's positions that any of those which `mask` keeps is computed of.

        mask: 0/1, (N, height, width) of what it gives.  size: of the input.  Returns (N, *size).
        """
        if self.is_pointwise:
            return mask
        module = framework(mask)
        kernel = [[float(i % self.dilation[0] == j % self.dilation[1] == 0) for j in range(self._reach(1))]
                  for i in range(self._reach(0))]  # fmt: skip
        touched = indicator(module.spread(stop(mask), kernel, self.stride) > 0.5, mask)
        (top, _), (left, _) = self.pads(size)
        touched = touched[:, top : top + size[0], left : left + size[1]]
        missing = _each(lambda i: size[i] - int(touched.shape[1 + i]))
        return module.padded(touched, missing) if any(missing) else touched

    def _reach(self, i: int) -> int:
        return self.dilation[i] * (self.kernel[i] - 1) + 1


def geometry(attributes: Mapping[str, Any], layout: str, kernel: Size) -> Geometry | None:
    """Return the geometry of a convolution from its framework's attributes; None for an unusual one."""
    if "padding" in attributes and "strides" in attributes:
        return _of_tensorflow(attributes, layout, kernel)
    if attributes.keys() & {"strides", "kernel_shape", "auto_pad", "pads"}:
        return _of_onnx(attributes, kernel)
    return _of_pytorch(attributes, kernel)


def _of_tensorflow(attributes: Mapping[str, Any], layout: str, kernel: Size) -> Geometry:
    places = [layout.index("H"), layout.index("W")]
    stride, dilation = (_pair([attributes[name][i] for i in places]) for name in ("strides", "dilations"))
    name = attributes["padding"]
    name = name.decode() if isinstance(name, bytes) else name
    explicit = attributes.get("explicit_paddings") or [0] * 8
    given = tuple((int(explicit[2 * i]), int(explicit[2 * i + 1])) for i in places)
    return Geometry(kernel, stride, dilation, None if name == "SAME" else given)  # type: ignore[arg-type]


def _of_onnx(attributes: Mapping[str, Any], kernel: Size) -> Geometry | None:
    stride, dilation = (_pair(attributes.get(name) or 1) for name in ("strides", "dilations"))
    automatic = attributes.get("auto_pad", "NOTSET")
    automatic = automatic.decode() if isinstance(automatic, bytes) else automatic
    if automatic in ("SAME_UPPER", "SAME_LOWER"):
        return Geometry(kernel, stride, dilation, None) if automatic == "SAME_UPPER" else None
    top, left, bottom, right = map(int, attributes.get("pads") or (0, 0, 0, 0))
    return Geometry(kernel, stride, dilation, ((top, bottom), (left, right)))


def _of_pytorch(attributes: Mapping[str, Any], kernel: Size) -> Geometry | None:
    stride, dilation = (_pair(attributes.get(name, 1)) for name in ("stride", "dilation"))
    padding = attributes.get("padding", 0)
    if padding == "same":
        total = _each(lambda i: dilation[i] * (kernel[i] - 1))
        return Geometry(kernel, stride, dilation, tuple((one // 2, one - one // 2) for one in total))  # type: ignore[arg-type]
    if attributes.get("transposed"):
        return None
    pads = _pair(0 if padding == "valid" else padding)
    return Geometry(kernel, stride, dilation, ((pads[0], pads[0]), (pads[1], pads[1])))


def _pair(value: int | Sequence[int]) -> Size:
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[-1])


def _each(extent: Any) -> Size:
    return extent(0), extent(1)
