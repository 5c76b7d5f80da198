"""Fake quantisation: grids of numbers, scale and zero point of a range, rounding, and PyTorch's kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import amanda
from amanda.errors import AmandaError
from amanda.options import Range
from amanda.tools.axes import Unfolding, canonical, restored
from amanda.tools.kit import RequiredNames, tensors_of
from amanda.tools.mapping import backend_of
from amanda.tools.quantize._tensorflow import tensorflow_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


Rounding = Literal["half_even", "half_up", "half_away"]
"""The direction in which a value half way between two integers is rounded: to even, up, or away from 0."""

Float8 = Literal["e4m3", "e5m2"]
"""Floating types of 8 bits: float8_e4m3fn, which has no infinity, and float8_e5m2."""

Bits: TypeAlias = Annotated[int, Range(2, 16)] | Float8
"""A number of bits for integers, or a floating type."""

EPSILON = 1.1920928955078125e-07
"""The least scale, which is float32's epsilon as in torch.ao."""


class QuantizeError(AmandaError, ValueError, module="amanda.tools.quantize"):
    """Options, values or files that cannot be used for quantisation."""


@dataclass(frozen=True)
class Grid:
    """The integers low, low + 1, ..., high; symmetric: True if zero is always the zero point.

    dtype: name of the floating type of a `FloatGrid`; "" for integers.
    """

    low: int
    high: int
    symmetric: bool = False
    dtype: str = field(default="", repr=False)

    @property
    def bits(self) -> int:
        """Return the number of bits of the integers."""
        return (self.high - self.low).bit_length()

    @classmethod
    def of(cls, bits: Bits, symmetric: bool) -> Grid:
        """Return the grid of the numbers of so many bits.

        Args:
            bits: Or "e4m3" or "e5m2" for the numbers of a floating type, which always are symmetric.
            symmetric: True for signed integers, False for unsigned ones.

        Raises:
            QuantizeError: For other than 2 to 16 bits.

        >>> Grid.of(4, symmetric=True)
        Grid(low=-8, high=7, symmetric=True)
        """
        # "e4m3" before numbers, as the check of numbers would refuse it.
        if isinstance(bits, str) and bits in get_args(Float8):
            return _FLOAT_GRIDS[bits]
        # True is an int in Python, and 1 bit no grid.
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
            raise QuantizeError(f"{bits!r} bits; give a number from 2 to 16, or {' or '.join(_FLOAT_GRIDS)}")
        low = -(1 << (bits - 1)) if symmetric else 0
        return cls(low, low + (1 << bits) - 1, symmetric)


@dataclass(frozen=True)
class FloatGrid(Grid):
    """The finite numbers of a floating type of 8 bits.

    dtype: PyTorch's and ml_dtypes' name of the type.  least_exponent: of the normal numbers.
    """

    dtype: str = ""
    mantissa_bits: int = 0
    least_exponent: int = 0

    @property
    def bits(self) -> int:
        """Return the number of bits of the type."""
        return 8

    def nearest(self, x: Any) -> Any:
        """Return the nearest numbers of the grid, half to even; NaN stays."""
        xp = tensors_of(x)
        # Saturated, as torchao casts do: e4m3 has no infinity.
        x = xp.minimum(xp.maximum(x, self.low), self.high)
        magnitude = xp.absolute(x)
        # Subnormal numbers share the step of the least normal exponent. Times 0 instead of zeros_like keeps
        # NaN.
        step = magnitude * 0 + 2.0 ** (self.least_exponent - self.mantissa_bits)
        # Comparisons instead of a logarithm, which rounds next to powers of two; e5m2 has 30 exponents.
        end_exponent = self.high.bit_length()  # one above the exponent of the largest number
        for exponent in range(self.least_exponent + 1, end_exponent):
            larger_step = step * 0 + 2.0 ** (exponent - self.mantissa_bits)
            step = xp.where(magnitude >= 2.0**exponent, larger_step, step)
        return xp.round(x / step) * step


_FLOAT_GRIDS = {
    "e4m3": FloatGrid(-448, 448, True, "float8_e4m3fn", 3, -6),
    "e5m2": FloatGrid(-57344, 57344, True, "float8_e5m2", 2, -14),
}


@dataclass(frozen=True)
class Groups:
    """Groups of weights that share a scale: so many consecutive inputs of each output.

    size: of a group.  layout: axes of the weight, as `weight_layout` of StandardMapping; further axes in
    front of them are of a batch.  Inputs of a convolution are in the order of its channels and its window.
    are_outputs: a group is all that an output has, where no axis of the weight counts the outputs.
    """

    size: int
    layout: str
    are_outputs: bool = False

    @classmethod
    def of_outputs(cls, shape: Sequence[int], layout: str) -> Groups:
        """Return a group for each output of a weight of this shape.

        Args:
            shape: Shape of the weight.
            layout: Its layout, as in StandardMapping.
        """
        unfolding = Unfolding.of(shape, layout)
        return cls(prod(unfolding.canonical[unfolding.outputs :]), layout, are_outputs=True)

    def fit(self, shape: Sequence[int]) -> bool:
        """Return True if the inputs of a weight of this shape are a multiple of the size."""
        unfolding = Unfolding.of(shape, self.layout)
        return prod(unfolding.canonical[unfolding.outputs :]) % self.size == 0

    def split(self, x: Any) -> Any:
        """Return a weight as (groups, size), a row for each group, output by output."""
        return tensors_of(x).reshape(canonical(x, self.layout), (-1, self.size))

    def joined(self, rows: Any, shape: Sequence[int]) -> Any:
        """Return rows (groups, size) as a weight of this shape: the inverse of `split`.

        Args:
            rows: (groups, size), as `split` returns them.
            shape: Shape of the weight.
        """
        canonical_weight = tensors_of(rows).reshape(rows, Unfolding.of(shape, self.layout).canonical)
        return restored(canonical_weight, self.layout, shape)


def choose_qparams(least: Any, most: Any, grid: Grid, rounding: Rounding = "half_even") -> tuple[Any, Any]:
    """Return the scale and zero point for a range, after it is widened to include zero.

    Sources: torch.ao.quantization.observer.UniformQuantizationObserverBase of PyTorch 2.13; Nudge in
    fake_quant_ops_functor.h of TensorFlow 2.21; Jacob et al. 2018, sec. 2.1.

    Args:
        least: Scalars or (channels,) in float32, of any framework.  The scale is (most - least) / (high -
            low), of a symmetric grid 2 max(-least, most) / (high - low), and at least EPSILON.  The zero
            point low - least / scale is rounded as in torch.ao with "half_even", otherwise as in TensorFlow:
            half away from zero.
        most: See `least`.
        grid: Numbers of the quantised type.
        rounding: See `least`.
    """
    xp = tensors_of(least)
    # A difference gives a zero of the type and on the device of the range, in each framework.
    zero, steps = least - least, xp.cast(grid.high - grid.low, least)
    # Zero has to be exact: padding and ReLU make it more often than any other number.
    least, most = xp.minimum(least, zero), xp.maximum(most, zero)
    if grid.symmetric:
        return xp.maximum(xp.maximum(-least, most) / (steps / 2), xp.cast(EPSILON, zero)), zero
    scale = xp.maximum((most - least) / steps, xp.cast(EPSILON, zero))
    if rounding == "half_even":
        # Rounded before the difference, as torch.ao does; the order shows at ties.
        zero_point = grid.low - xp.round(least / scale)
    else:
        zero_point = xp.floor(grid.low - least / scale + xp.cast(0.5, zero))
    return scale, xp.minimum(xp.maximum(zero_point, zero + grid.low), zero + grid.high)


def as_array(x: Any) -> NDArray[Any]:
    """Return a tensor as an array of NumPy, in float32 or wider."""
    tensors = tensors_of(x)
    return tensors.to_numpy(tensors.wide(x))


def other_axes(x: Any, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of a tensor that are not among `axes`."""
    return tuple(axis for axis in range(len(x.shape)) if axis not in axes)


def broadcast_channels(qparam: Any, x: Any, axes: Sequence[int]) -> Any:
    """Return a scale or zero point, (channels,), in a shape that broadcasts with `x`; scalars unchanged.

    axes: of the channels in `x`; several are taken together, the last varies fastest.
    """
    if not axes:
        return qparam
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(len(x.shape))]
    return tensors_of(qparam).reshape(qparam, shape)


def flatten_channels(x: Any, axes: Sequence[int]) -> Any:
    """Return the result of a reduction as (channels,); a scalar without axes."""
    return tensors_of(x).reshape(x, (-1,)) if axes else x


class Scale(NamedTuple):
    """Scale and zero point of a tensor, scalars or (channels,); the grid; axes of the channels, or groups."""

    scale: Any
    zero_point: Any
    grid: Grid
    axes: Sequence[int] = ()
    groups: Groups | None = None


def fake_quantize(
    x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int] = (),
    rounding: Rounding = "half_even", kernel: bool = True,
) -> Any:  # fmt: skip
    """Return (clip(round(x / scale) + zero_point, low, high) - zero_point) * scale, in the type of `x`.

    NaN stays, and infinity is clipped.

    Args:
        x: Of any framework and shape.
        scale: float32, scalars, or (channels,) with `axes` of the channels in x.
        zero_point: See `scale`.
        grid: Numbers of the quantised type.
        axes: Axes of the channels in x; () for one scale.
        rounding: "half_even" is bit-equal to torch.ao's FakeQuantize, which multiplies by 1 / scale;
            "half_up" to TensorFlow's fake_quant_with_min_max_vars, which clips and shifts before it rounds,
            divides by a scalar scale, and multiplies by levels / range per channel; "half_away" rounds as C's
            round does.  A floating grid gives the number of the type that is nearest to x / scale, times
            scale: bit-equal to torchao's float8 tensors.
        kernel: True to use a kernel of the framework if there is one; results are bit-equal.
    """
    xp = tensors_of(x)
    kernel_result = _run_kernel(x, scale, zero_point, grid, axes, rounding) if kernel else None
    if kernel_result is not None:
        return kernel_result
    wide_x, scale, zero_point = _broadcast_qparams(x, scale, zero_point, axes)
    if isinstance(grid, FloatGrid):
        return xp.cast(grid.nearest(wide_x / scale) * scale, x)
    if rounding == "half_up":
        return xp.cast(_quantize_half_up(wide_x, scale, zero_point, grid, per_channel=bool(axes)), x)
    # A product with 1 / scale, as in torch.ao: a quotient would round some ties otherwise.
    integers = _round(wide_x * (1 / scale), rounding) + zero_point
    clipped = xp.minimum(xp.maximum(integers, grid.low), grid.high)
    return xp.cast((clipped - zero_point) * scale, x)


def _quantize_half_up(wide_x: Any, scale: Any, zero_point: Any, grid: Grid, per_channel: bool) -> Any:
    """Return fake-quantised values as TensorFlow's fake_quant_with_min_max_vars computes them."""
    xp = tensors_of(wide_x)
    least, most = (grid.low - zero_point) * scale, (grid.high - zero_point) * scale
    # A number over a tensor is a product with a reciprocal in torch, which rounds twice.
    steps_per_unit = xp.cast(grid.high - grid.low, scale) / (most - least)
    above_least = xp.maximum(xp.minimum(wide_x, most), least) - least
    steps = above_least * steps_per_unit if per_channel else above_least / scale
    steps_to_zero = xp.floor(-least * steps_per_unit + 0.5)
    return xp.floor(steps - steps_to_zero + 0.5) * scale


def straight_through(x: Any, *qparams: Any) -> Any:
    """Return `fake_quantize(x, *qparams)`, with `fake_quantize_gradient` as its gradient."""
    # Kernels bring their own gradient.
    kernel_result = _run_kernel(x, *qparams)
    if kernel_result is not None:
        return kernel_result

    def backward(gradient: Any, x: Any) -> tuple[Any]:
        return (fake_quantize_gradient(gradient, x, *qparams),)

    return tensors_of(x).with_gradient(lambda x: fake_quantize(x, *qparams), backward, [x])


def _run_kernel(x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int], rounding: str) -> Any:
    """Return the result of a differentiable kernel of the framework.

    None without such a kernel, for another rounding than "half_even", and where the kernel declines.
    """
    kernel = _KERNELS.get(backend_of(x)) if rounding == "half_even" else None
    return None if kernel is None else kernel(x, scale, zero_point, grid, axes)


@amanda.traceable
def fake_quantize_fixed(x: Any, scales: Mapping[int | None, Scale], rounding: Rounding) -> Any:
    """Quantise a tensor, or tensors of a list, by fixed scales, with traceable operations alone.

    scales: by the index in the list, or under None the scale of `x` itself.
    """

    def quantise_item(list_index: int | None, tensor: Any) -> Any:
        """Return a quantised tensor of the list; unchanged without a scale."""
        if list_index not in scales:
            return tensor
        scale, zero_point, grid, axes, groups = scales[list_index]
        rows = tensor if groups is None else groups.split(tensor)
        # Without kernels, which need data that graphs lack.
        quantised = fake_quantize(rows, scale, zero_point, grid, axes, rounding, kernel=False)
        return quantised if groups is None else groups.joined(quantised, tensor.shape)

    if None in scales:
        return quantise_item(None, x)
    return [quantise_item(list_index, tensor) for list_index, tensor in enumerate(x)]


def fake_quantize_gradient(
    gradient: Any, x: Any, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int] = (),
    rounding: Rounding = "half_even",
) -> Any:  # fmt: skip
    """Return the straight-through gradient: `gradient` where `x` was not clipped, else 0.

    Values that round to an integer of the grid are not clipped, as in PyTorch; with "half_up" and
    floating grids, values between the ends.  Source: Bengio et al. 2013, sec. 4; Jacob et al. 2018.

    Args:
        gradient: Gradient of the result of `fake_quantize`.
        x: As in `fake_quantize`.
        scale: As in `fake_quantize`.
        zero_point: As in `fake_quantize`.
        grid: As in `fake_quantize`.
        axes: As in `fake_quantize`.
        rounding: As in `fake_quantize`.
    """
    wide_x, scale, zero_point = _broadcast_qparams(x, scale, zero_point, axes)
    if isinstance(grid, FloatGrid):
        passes = tensors_of(wide_x).absolute(wide_x / scale) <= grid.high
    elif rounding == "half_up":
        passes = (wide_x >= (grid.low - zero_point) * scale) & (wide_x <= (grid.high - zero_point) * scale)
    else:
        integers = _round(wide_x * (1 / scale), rounding) + zero_point
        # After rounding, as in PyTorch: a value half a step outside of the grid still rounds to its end.
        passes = (integers >= grid.low) & (integers <= grid.high)
    # Times 0 instead of a plain 0: a gradient of NaN stays visible.
    return tensors_of(gradient).where(passes, gradient, gradient * 0)


def _broadcast_qparams(x: Any, scale: Any, zero_point: Any, axes: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return x, scale and zero point in float32 or wider, in shapes that broadcast."""
    wide_x, cast = tensors_of(x).wide(x), tensors_of(x).cast
    scale, zero_point = (broadcast_channels(qparam, x, axes) for qparam in (scale, zero_point))
    return wide_x, cast(scale, wide_x), cast(zero_point, wide_x)


def _round(x: Any, rounding: Rounding) -> Any:
    """Round to integers, ties in the direction of `rounding`."""
    xp = tensors_of(x)
    if rounding == "half_even":
        return xp.round(x)
    # Away from 0 on both sides, which floor alone does for positive numbers only.
    magnitude = xp.floor(xp.absolute(x) + 0.5)
    return xp.where(x < 0, -magnitude, magnitude)


_TORCH_NAMES = RequiredNames("amanda.tools.quantize", "torch", "torch:_C._are_functorch_transforms_active")

SMALL = 1 << 15
"""Elements up to which calls of Python take longer than one pass over the elements."""


def torch_kernel(x: Tensor, scale: Any, zero_point: Any, grid: Grid, axes: Sequence[int]) -> Tensor | None:
    """Return fake-quantised values with a gradient, by PyTorch's kernel on CUDA, elsewhere by its operators.

    On the host PyTorch's kernel is five times as slow as its operators.
    Returns None for a tensor of another type than float32, for several axes, and for gradients of float8.
    """
    import torch

    # PyTorch's kernels take one axis; half types are computed in float32 by the general formula.
    if x.dtype != torch.float32 or len(axes) > 1:
        return None
    # The cast to float8 has no straight-through gradient.
    if grid.dtype and torch.is_grad_enabled() and x.requires_grad:
        return None
    broadcast_shape = [-1 if axis in axes else 1 for axis in range(x.dim())] if axes else []
    # Scales are fixed: without `detach` autograd would record their gradients too.
    scale, zero_point = scale.detach(), zero_point.detach()
    if x.is_cuda and not grid.dtype:
        return _run_fused_kernel(x, scale, zero_point, grid, axes, broadcast_shape)
    scale, zero_point = (a.to(x.device, x.dtype).reshape(broadcast_shape) for a in (scale, zero_point))
    if grid.dtype:
        codes: Tensor = (x / scale).clamp_(grid.low, grid.high).to(getattr(torch, grid.dtype))
        return codes.to(x.dtype).mul_(scale)
    if torch.is_grad_enabled() and x.requires_grad:
        _TORCH_NAMES.check()
        # A large tensor pays for its passes, a small one for calls of Python: each has its own way.
        if x.numel() > SMALL or torch._C._are_functorch_transforms_active():
            quantised: Tensor
            quantised, _ = _straight_through_rounding().apply(x, scale, zero_point, grid.low, grid.high)
            return quantised
        return _with_native_gradient(x, scale, zero_point, grid)
    # In place on the new tensor: one allocation instead of four.
    integers = _unclipped_integers(x, scale, zero_point)
    return integers.clamp_(grid.low, grid.high).sub_(zero_point).mul_(scale)


def _run_fused_kernel(
    x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, axes: Sequence[int], scale_shape: Sequence[int]
) -> Tensor:
    """Return the result of PyTorch's kernel, corrected for NaN, and for integers beyond int64 per channel.

    The kernel makes both the least value; here NaN stays, and large values become an end of the grid.
    """
    import torch

    integers = zero_point.to(torch.int32)
    if axes:
        # The kernel converts to int64, where larger numbers wrap round; 2 ** 62 leaves room for zero points.
        most = (scale * 2.0**62).reshape(scale_shape)
        clamped = x.clamp(-most, most)
        quantised = torch.fake_quantize_per_channel_affine(
            clamped, scale, integers, axes[0], grid.low, grid.high
        )
    else:
        quantised = torch.fake_quantize_per_tensor_affine(x, scale, integers, grid.low, grid.high)
    with torch.no_grad():
        # Between equal bounds everything becomes the bound, and NaN stays NaN.
        return torch.clamp(x, min=quantised, max=quantised, out=quantised)


def _with_native_gradient(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """Return fake-quantised values with a straight-through gradient, which autograd computes by a product.

    That takes one pass over the elements more, and no call of Python in the backward pass.
    """
    import torch

    with torch.no_grad():
        integers = _unclipped_integers(x, scale, zero_point)
        clipped = integers.clamp(grid.low, grid.high)
        passes = clipped == integers
    # The gradient of this product is the gradient where values pass: autograd needs no function of Python.
    result = x * passes
    with torch.no_grad():
        # Only the values are replaced, outside autograd, which keeps the node of the product.
        return torch.mul(clipped.sub_(zero_point), scale, out=result)


def _unclipped_integers(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return x / scale, rounded, plus the zero point."""
    # The reciprocal as in torch.ao, see `fake_quantize`.
    return (x * (1 / scale)).round_().add_(zero_point)


@functools.cache
def _straight_through_rounding() -> Any:
    """Return the straight-through estimator, whose gradient passes where values were not clipped.

    It is for large tensors, and for torch.func's transforms, which take no `out=`.
    """
    import torch

    class StraightThroughRounding(torch.autograd.Function):
        """Fake quantisation, and a mask of the values that were not clipped, where the gradient passes."""

        generate_vmap_rule = True

        @staticmethod
        def forward(x: Any, scale: Any, zero_point: Any, low: int, high: int) -> Any:
            integers = _unclipped_integers(x, scale, zero_point)
            clipped = integers.clamp(low, high)
            passes = clipped == integers
            return clipped.sub_(zero_point).mul_(scale), passes

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            _, passes = output
            ctx.mark_non_differentiable(passes)
            ctx.save_for_backward(passes)

        @staticmethod
        def backward(ctx: Any, gradient: Any, _: Any) -> Any:
            (passes,) = ctx.saved_tensors
            # The op of a gradient is not an op of the program.
            with amanda.disabled():
                return gradient * passes, None, None, None, None

    return StraightThroughRounding


_KERNELS = {"torch": torch_kernel, "tensorflow": tensorflow_kernel}
"""Kernels by autoray's name of a library; other libraries compute by the operations of `Tensors`."""
