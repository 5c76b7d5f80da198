"""AWQ and SmoothQuant: factors of the inputs of weights, by the magnitudes of activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import amanda
from amanda.options import PositiveInt, Range, Share, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake_quantize import QuantizeError
from amanda.tools.quantize.weights._calibrated import CalibratedWeight, InputSums
from amanda.tools.quantize.weights._integers import (
    IntegerTool,
    WeightBits,
    dequantized,
    quantized,
    sum_and_norm_of,
)
from amanda.tools.quantize.weights._scale_folding import FoldingTool, FoldResult, reduce_by_slot
from amanda.tools.select import as_remarks
from amanda.tools.weights import ParameterSlice, ParameterStore, SelectionOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from typing_extensions import Unpack


Steps: TypeAlias = Annotated[int, Range(1, 10_000)]


class AWQTool(IntegerTool, FoldingTool):
    """Quantise weights by AWQ: weights of inputs with large activations are scaled up before rounding.

    Ops read the dequantised weight divided by the scales of its inputs.  Each weight has scales of its own;
    after `prepare` weights of one input share scales, which `finalize` folds into the layers that compute the
    input.

    Args:
        bits: 2 to 8.
        group_size: Number of consecutive inputs of an output that share a scale; None for all.
        symmetric: True for signed integers with zero point 0, False for unsigned integers.
        steps: Number of exponents between 0 and 1 to try, for scales that are powers of activations.
        clip: True to shrink the range of each group too: see `awq_clipped`.  The authors' code does so for
            all layers but queries and keys, which `exclude` and a second tool leave out.
        type: Globs of op types; None for every convolution and product.
        module: Globs of module paths to change, and to leave unchanged.
        exclude: See `module`.

    Raises:
        QuantizeError: For invalid options.

    >>> awq = AWQTool(bits=4, group_size=32)
    """

    @checked(error=QuantizeError)
    def __init__(
        self,
        bits: WeightBits = 4,
        group_size: PositiveInt | None = 128,
        symmetric: bool = True,
        steps: Steps = 20,
        clip: bool = False,
        **selected: Unpack[SelectionOptions],
    ) -> None:
        super().__init__(bits, group_size, symmetric, **selected)
        self._steps, self._clip = steps, clip

    def on_weight(self, weight: CalibratedWeight) -> str | None:
        """Create the state for a weight's integers and its inputs' scales; return a reason to skip it."""
        reason = super().on_weight(weight)
        if reason is None:
            # By input and place in the window: AWQ scales columns of the matrix.
            weight.keep("smoothing", np.ones(int(np.prod(weight.canonical_shape[1:])), "float32"))
        return reason

    def solve(self, weight: CalibratedWeight, matrix: Tensor, input_sums: InputSums) -> None:
        """Choose the scales of the inputs of a weight, and its integers."""
        super().solve(weight, matrix, input_sums)
        scales, size = weight.like(weight["smoothing"], matrix), self.group_size_of(weight)
        scaled_matrix = matrix * scales
        if self._clip:
            assert input_sums.gram is not None
            # The inputs are divided by the scales, and so are their products twice.
            gram = input_sums.gram / input_sums.count / (scales * scales[:, None])
            scaled_matrix = awq_clipped(
                scaled_matrix, gram, partial(self._round_to_integers, size=size), size
            )
        self.store_codes(weight, matrix, quantized(scaled_matrix, self.grid, size))

    def compute_factors(
        self, calibrated: Sequence[tuple[CalibratedWeight, Tensor, InputSums]], slots: NDArray[Any] | None
    ) -> Tensor:
        """Return the scales of an input with the least error of all weights that multiply it."""
        import torch

        # slots: see `Fold`; None for a weight without a fold.
        weights, matrices, input_sums = zip(*calibrated, strict=True)
        count = sum(weight_sums.count for weight_sums in input_sums)
        magnitudes = sum(weight_sums.magnitudes for weight_sums in input_sums) / count
        gram = sum(weight_sums.gram for weight_sums in input_sums) / count
        round_matrix = partial(self._round_to_integers, size=self.group_size_of(weights[0]))
        return awq_scales(
            torch.cat(matrices), reduce_by_slot(magnitudes, slots, "mean"), gram, round_matrix, self._steps
        )

    def on_folded(
        self, weight: CalibratedWeight, value: Tensor, scales: Sequence[tuple[int, Tensor]],
        inputs_are_folded: bool,
    ) -> None:  # fmt: skip
        """Multiply the scales of integers by the multipliers of outputs; store sums of the new value.

        Folded scales of inputs become 1, as in `FoldingTool.on_folded`.
        """
        super().on_folded(weight, value, scales, inputs_are_folded)
        for axis, scale in scales:
            if weight.layout is not None and weight.layout[axis] == "O":
                # Integers stay: a factor of a whole output is one of its scales.
                weight["scale"] = weight["scale"] * weight.like(scale, weight["scale"])[:, None]
        weight["sums"] = sum_and_norm_of(weight.plain(value))

    def finalize(self, model: Any) -> Any:
        """Write the dequantised weights into a model, see `WeightTool.finalize`.

        After `prepare` the scales of inputs are folded into the layers that compute the inputs; remarks of
        the result name the weights whose scales cannot be folded, and why.
        Raises QuantizeError as `WeightTool.finalize` does; after an exception model and tool are as before.
        """
        if self._fold_by_weight is None:  # without `prepare`
            return super().finalize(model)
        self.check_model(model)
        with amanda.disabled(), ParameterStore.undone_on_error() as undo:
            # Before the weights are written: dequantised weights are then divided by factors that are 1.
            fold_result = self.write_factors(model, undo)
            result = super().finalize(model)
        remarks = (f"{name} holds the scales of its inputs: {why}" for name, why in fold_result.left.items())
        result.remarks = [*result.remarks, *as_remarks(remarks)]
        return result

    def _round_to_integers(self, matrix: Tensor, size: int) -> Tensor:
        """Return a matrix that is quantised and dequantised, in groups of so many inputs."""
        return dequantized(*quantized(matrix, self.grid, size))


@checked(error=QuantizeError)
def awq_scales(
    matrix: Tensor,
    magnitudes: Tensor,
    gram: Tensor,
    rounded: Callable[[Tensor], Tensor],
    steps: Steps = 20,
) -> Tensor:
    """Return the scales of inputs, (K,), with the least squared error of the outputs.

    The scales are powers of the magnitudes, with exponents 0, 1 / steps, ..., 1 - 1 / steps, divided by the
    root of their largest times their smallest.

    Sources: Lin et al. 2023, eqs. 4 and 5; `auto_scale` of the authors' code.

    Args:
        matrix: (outputs, K).
        magnitudes: (K,), mean magnitudes of the inputs.
        gram: (K, K), mean products of pairs of inputs.
        rounded: Quantises and dequantises a matrix.

    Raises:
        QuantizeError: If no error is a finite number.
    """
    best_scales, least_loss = None, float("inf")
    for step in range(steps):
        # The bound and the normalisation are those of the authors' code: dead inputs would have the scale 0.
        scales = magnitudes.pow(step / steps).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = (rounded(matrix * scales) / scales - matrix).to(gram.dtype)
        # The squared error of the outputs by the gram matrix, without the inputs themselves.
        loss = float(((error @ gram) * error).sum())
        if loss < least_loss:
            best_scales, least_loss = scales, loss
    if best_scales is None:
        raise QuantizeError(
            f"the errors of all {steps} exponents overflow {gram.dtype}: scale the inputs down"
        )
    return best_scales


@checked(error=QuantizeError)
def awq_clipped(
    matrix: Tensor,
    gram: Tensor,
    rounded: Callable[[Tensor], Tensor],
    size: PositiveInt,
    steps: Steps = 20,
) -> Tensor:
    """Return a matrix whose groups of so many inputs are clipped to the limits of least squared error.

    The limits are 1, 1 - 1 / steps, ... of the largest magnitude of a group, to above a half of it; the error
    is that of the part of an output that comes from the group.

    Source: `auto_clip_layer` of the authors' code of Lin et al. 2023, with all inputs instead of a sample.

    Args:
        matrix: (outputs, K).
        gram: (K, K), mean products of pairs of the inputs.
        rounded: Quantises and dequantises a matrix.
    """
    import torch

    groups = matrix.reshape(len(matrix), -1, size)
    grams = torch.stack([gram[i : i + size, i : i + size] for i in range(0, len(gram), size)])
    most = groups.abs().amax(-1, keepdim=True)
    best_groups, least_loss = groups, torch.full_like(most, torch.inf)
    for step in range(steps // 2):
        limit = most * (1 - step / steps)
        clipped_groups = groups.clamp(-limit, limit)
        error = (rounded(clipped_groups.reshape(matrix.shape)).reshape(groups.shape) - groups).to(grams.dtype)
        loss = (torch.einsum("ogi,gij->ogj", error, grams) * error).sum(-1, keepdim=True)
        best_groups = clipped_groups.where(loss < least_loss, best_groups)
        least_loss = loss.minimum(least_loss)
    return best_groups.reshape(matrix.shape)


class SmoothQuantTool(FoldingTool):
    """Smooth activations: divide inputs of products by a factor for each channel, and multiply weights by it.

    Products stay the same within rounding; a `QuantizeTool` that is applied after this tool quantises smaller
    outliers.  Each weight has factors of its own; after `prepare` weights of one input share factors, which
    `finalize` folds into the layers that compute the input.

    Args:
        alpha: Exponent between 0 (activations unchanged) and 1 (outliers move into weights completely).
        type: Globs of op types; None for every convolution and product.
        module: Globs of module paths to change, and to leave unchanged.
        exclude: See `module`.

    Raises:
        QuantizeError: For an alpha that is not between 0 and 1.

    >>> smooth = SmoothQuantTool(alpha=0.5)
    """

    wants_gram = False
    transforms_gradients = True

    @checked(error=QuantizeError)
    def __init__(
        self,
        alpha: Share = 0.5,
        **selected: Unpack[SelectionOptions],
    ) -> None:
        super().__init__(**selected)
        self._alpha = alpha

    def on_weight(self, weight: CalibratedWeight) -> str | None:
        """Create the state for the factor of each input channel; return a reason if axes are not known."""
        if weight.layout is None:
            return "which of its axes are inputs is not known"
        weight.keep("smoothing", np.ones(weight.canonical_shape[1], "float32"))
        return None

    def compute_factors(
        self, calibrated: Sequence[tuple[CalibratedWeight, Tensor, InputSums]], slots: NDArray[Any] | None
    ) -> Tensor:
        """Return the factors of weights of one input, by the maxima of channels over all their places."""
        import torch

        first_weight, _, _ = calibrated[0]
        channels = first_weight.canonical_shape[1]
        input_maxima = [
            input_sums.max_magnitudes.reshape(channels, -1).amax(1) for _, _, input_sums in calibrated
        ]
        # Over all weights that read the input: they share its factor.
        weight_maxima = [
            matrix.abs().reshape(len(matrix), channels, -1).amax((0, 2)) for _, matrix, _ in calibrated
        ]
        input_maxima_by_slot = reduce_by_slot(torch.stack(input_maxima).amax(0), slots, "amax")
        weight_maxima_by_slot = reduce_by_slot(torch.stack(weight_maxima).amax(0), slots, "amax")
        # `smoothing` takes a weight: one with a single output has the maxima themselves.
        return smoothing(input_maxima_by_slot, weight_maxima_by_slot[None], self._alpha)

    def transform(self, value: Any, smoothing: Any) -> Any:
        """Return a weight (outputs, channels, ...) times the factors."""
        # Multiplied where a QuantizeTool behind reads the weight, so that it quantises the smoothed one.
        return value * smoothing.reshape(1, -1, *(1,) * (value.dim() - 2))

    transform_gradient = transform

    def on_product(
        self, context: amanda.OpContext, inputs: Sequence[int], axis: int, find_weight: Any
    ) -> None:
        """Divide the input of an op by the factors."""
        context.insert_before_op(self._divide, inputs=inputs, axis=axis, find_weight=find_weight)

    @amanda.differentiable
    def _divide(self, x: Tensor, value: Tensor, axis: int, find_weight: Any, run: dict[str, Any]) -> Any:
        """Return the input divided by the factors of its channels, and the unchanged weight.

        Returns None, for no change, before the factors are computed.  Raises QuantizeError for a value that
        is read in another form than elsewhere.
        """
        weight = find_weight(value, ParameterSlice.of_execution(run))
        # Without a weight the input could not be divided, while another op's weight is multiplied.
        if not isinstance(weight, CalibratedWeight):
            raise QuantizeError("the op reads another form of a parameter than another op that is smoothed")
        if not weight.is_ready:
            return None
        factors = weight.tensors_like(x, ["smoothing"])["smoothing"]
        trailing_axes = -axis - 1  # behind the channels, which count from the end
        # Both inputs are returned, as the routine reads both positions.
        return x / factors.reshape(-1, *(1,) * trailing_axes), value

    def finalize(self, model: Any) -> FoldResult:
        """Write the factors into the parameters of a model, which then computes the same without the tool.

        A weight whose input no parameter can absorb stays unchanged, and so do all weights without `prepare`
        before the calibration: see `left` of the result.
        Raises QuantizeError for a model without a calibrated weight; an exception restores model and tool.
        """
        with amanda.disabled(), ParameterStore.undone_on_error() as undo:
            return self.write_factors(model, undo)


@checked(error=QuantizeError)
def smoothing(most: Tensor, weight: Tensor, alpha: Share = 0.5) -> Tensor:
    """Return max|x|^alpha / max|w|^(1 - alpha) of each input channel, (channels,).

    Both maxima and the factors are at least 1e-5, as in the authors' code, so that no factor is 0.  A channel
    whose weights are all 0 has the factor 1, since the quotient may overflow float16.

    Source: Xiao et al. 2022, eq. 4.

    Args:
        most: (channels,), largest magnitudes of the inputs.
        weight: (outputs, channels, ...).
    """
    weight_maxima = weight.abs().amax([axis for axis in range(weight.dim()) if axis != 1])
    factors = most.clamp(min=1e-5).pow(alpha) / weight_maxima.clamp(min=1e-5).pow(1 - alpha)
    return factors.clamp(min=1e-5).where(weight_maxima > 0, 1)
