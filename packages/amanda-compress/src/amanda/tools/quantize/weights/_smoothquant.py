"""SmoothQuant: move outliers of activations into weights (Xiao et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import amanda
from amanda.options import Share, checked
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize.weights._calibrated import CalibratedWeight, Samples
from amanda.tools.quantize.weights._scale_folding import FoldingTool, FoldResult, tied
from amanda.tools.weights import ParameterSlice, ParameterStore, SelectionOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from typing_extensions import Unpack


class SmoothQuantTool(FoldingTool):
    """Smooth activations: divide inputs of products by a factor for each channel, and multiply weights by it.

    Products stay the same within rounding; a `QuantizeTool` that is applied after this tool quantises smaller
    outliers.  Each weight has factors of its own; after `prepare` weights of one input share factors, which
    `finalize` folds into the layers that compute the input.

    alpha: exponent between 0 (activations unchanged) and 1 (outliers move into weights completely).
    type: globs of op types; None for every convolution and product.
    module, exclude: globs of module paths to change, and to leave unchanged.

    Raises QuantizeError for an alpha that is not between 0 and 1.

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
        """Create the state for the factor of each input channel."""
        if weight.layout is None:
            return "which of its axes are inputs is not known"
        weight.keep("smoothing", np.ones(weight.canonical_shape[1], "float32"))
        return None

    def factors(
        self, calibrated: Sequence[tuple[CalibratedWeight, Tensor, Samples]], slots: NDArray[Any] | None
    ) -> Tensor:
        """Return the factors of weights of one input: maxima over a convolution's window are a channel's."""
        import torch

        channels = calibrated[0][0].canonical_shape[1]
        most = [samples.most.reshape(channels, -1).amax(1) for _, _, samples in calibrated]
        largest = [
            matrix.abs().reshape(len(matrix), channels, -1).amax((0, 2)) for _, matrix, _ in calibrated
        ]
        both = (tied(torch.stack(maxima).amax(0), slots, "amax") for maxima in (most, largest))
        return smoothing(next(both), next(both)[None], self._alpha)

    def transform(self, value: Any, smoothing: Any) -> Any:
        """Return a weight (outputs, channels, ...) times the factors."""
        return value * smoothing.reshape(1, -1, *(1,) * (value.dim() - 2))

    transform_gradient = transform

    def on_product(self, context: amanda.OpContext, inputs: Sequence[int], axis: int, find: Any) -> None:
        """Divide the input of an op by the factors."""
        context.insert_before_op(self._divide, inputs=inputs, axis=axis, find=find)

    @amanda.differentiable
    def _divide(self, x: Tensor, value: Tensor, axis: int, find: Any, run: dict[str, Any]) -> Any:
        """Return the input divided by the factors of its channels, and the unchanged weight."""
        weight = find(value, ParameterSlice.of_execution(run))
        if not isinstance(weight, CalibratedWeight):
            raise QuantizeError("the op reads another form of a parameter than another op that is smoothed")
        if not weight.is_ready:
            return None
        factors = weight.tensors_like(x, ["smoothing"])["smoothing"]
        return x / factors.reshape(-1, *(1,) * (-axis - 1)), value

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

    most: (channels,), largest magnitudes of the inputs.  weight: (outputs, channels, ...).
    Both maxima and the factors are at least 1e-5, as in the authors' code, so that no factor is 0.  A channel
    whose weights are all 0 has the factor 1, since the quotient may overflow float16.
    Source: Xiao et al. 2022, eq. 4.
    """
    of_weight = weight.abs().amax([axis for axis in range(weight.dim()) if axis != 1])
    factors = most.clamp(min=1e-5).pow(alpha) / of_weight.clamp(min=1e-5).pow(1 - alpha)
    return factors.clamp(min=1e-5).where(of_weight > 0, 1)
