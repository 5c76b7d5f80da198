"""Feature boosting and suppression: pruning of convolutions' channels, by their inputs."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import amanda
from amanda.options import NonNegativeFloat, PositiveShare, Seed, checked
from amanda.tools.dynamic_prune._base import DynamicPruneTool, PrunedOp
from amanda.tools.dynamic_prune._math import (
    as_type_of,
    density_count,
    detached,
    normalised_gate,
    saliency,
    top_mask,
)
from amanda.tools.kit import DataflowNode
from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, spatial_axes

_NORMS = ("batch_norm", "instance_norm", "group_norm")
_MOMENTS = ("SquaredDifference", "StopGradient", "Shape")


@dataclass(eq=False)
class _GatedConvolution:
    """A convolution and its predictor; size: elements of the kernel."""

    pruned: PrunedOp
    layout: str
    weight: Any
    bias: Any
    size: int


@dataclass(eq=False)
class _ChannelGates:
    """Saliencies and gates that a predictor computed for the last input.

    gate: factors of the channels, (N, C).  share_kept: share of kept channels.  share_computed: share of the
    products that are needed, since zeros of the input need none.
    """

    saliency: Any = None
    gate: Any = None
    share_kept: Any = 1.0
    share_computed: Any = 1.0


class DynamicChannelPruneTool(DynamicPruneTool):
    """Scale channels of convolutions by predicted saliencies, and prune the least salient channels.

    The saliency is a linear function of the mean magnitudes of the input's channels; for each input the share
    `density` of channels with the largest saliencies is kept.  After a convolution with a normalisation, the
    saliency replaces the normalisation's scale.  Otherwise it multiplies the convolution's output, divided by
    its mean over the kept channels, without which activations would grow with their own size.

    penalty: factor of the mean saliencies in `loss()`.
    Source: Gao et al. 2019, "Dynamic channel pruning: feature boosting and suppression".
    """

    @checked
    def __init__(
        self, density: PositiveShare = 0.5, penalty: NonNegativeFloat = 1e-8, seed: Seed = 0
    ) -> None:
        super().__init__(seed, _ChannelGates)
        self._density, self._penalty = density, penalty

    def loss(self) -> Any:
        """Return penalty times the saliencies, summed over all convolutions and averaged over the batch."""
        saliencies = [
            prediction.saliency for prediction in self._predictions() if prediction.saliency is not None
        ]
        return (
            self._penalty * sum(do("sum", do("mean", prediction, axis=0)) for prediction in saliencies)
            if saliencies
            else 0.0
        )

    def _analyse(self, context: amanda.OpContext, node: DataflowNode) -> None:
        for position, number in enumerate(node.inputs):
            maker = self._flow.maker(number)
            if maker is not None and "layer" in maker.notes:
                self._gate_at(context, node, position, maker.notes)
        if context["type"] in CONVOLUTIONS and "N" in (context["layout"] or ""):
            layer = node.notes["layer"] = self._layer(context)
            context.insert_before_op(self._predict, inputs=[0], layer=layer)
            context.insert_after_op(self._count, outputs=[0], layer=layer)

    def _gate_at(
        self, context: amanda.OpContext, node: DataflowNode, position: int, notes: dict[str, Any]
    ) -> None:
        """Insert the pruning of a convolution's channels at an op that reads them."""
        kind, layer = context["type"], notes["layer"]
        with_vector = kind in ("BiasAdd", "mul", "add") and _is_vector(node, 1 - position, layer)
        if kind in _NORMS and position == 0:
            if context["weight_index"] is not None:
                context.insert_before_op(self._replace_scale_by_ones, inputs=[context["weight_index"]])
            context.insert_after_op(self._prune, outputs=[0], layer=layer)
        elif with_vector and kind == "add" and notes.get("scaled"):
            context.insert_after_op(self._prune, layer=layer)
        elif with_vector and kind != "add":
            node.notes.update(layer=layer, scaled=kind == "mul")
        elif kind not in _MOMENTS and not context.get_attrs().get("keep_dims"):
            context.insert_before_op(self._prune, inputs=[position], layer=layer, evenly=True)

    def _layer(self, context: amanda.OpContext) -> _GatedConvolution:
        x, kernel = context.get_inputs()[0], context.get_inputs()[context["weight_index"]]
        extents = dict(zip(context["weight_layout"], context["shape"](kernel), strict=True))
        in_channels = context["shape"](x)[context["layout"].index("C")]
        out_channels = extents["O"] if "O" in extents else extents["I"] * extents["M"]
        normal = self._initial_random.normal
        return self._op_record(context, lambda: _GatedConvolution(
            self._row(context, "channels"), context["layout"],
            # A tenth of what He et al. 2015 initialise with: a trained model begins near what it was.
            self._trainable(
                context, x, "saliency.weight",
                lambda: normal(0, 0.1 * (2 / in_channels) ** 0.5, (in_channels, out_channels)),
            ),
            self._trainable(context, x, "saliency.bias", lambda: np.ones(out_channels)),
            prod(extents.values()),
        ))  # fmt: skip

    @amanda.differentiable
    def _predict(self, x: Any, layer: _GatedConvolution) -> None:
        squeezed = do("mean", do("abs", x), axis=tuple(spatial_axes(layer.layout)))  # of Gao et al.
        squeezed = as_type_of(squeezed, layer.weight)
        prediction = self._states.of(layer)
        prediction.saliency = saliency(squeezed, layer.weight, layer.bias)
        count = density_count(self._density, int(layer.bias.shape[0]))
        keep_mask = top_mask(prediction.saliency, count)
        prediction.gate = prediction.saliency * keep_mask
        share_kept = do("mean", as_type_of(detached(prediction.gate) > 0, keep_mask), axis=-1)
        share_nonzero = do("mean", as_type_of(detached(squeezed) > 0, keep_mask), axis=-1)
        prediction.share_kept, prediction.share_computed = (
            do("mean", share_kept),
            do("mean", share_kept * share_nonzero),
        )

    @amanda.observer
    def _count(self, output: Any, layer: _GatedConvolution) -> None:
        positions, prediction = prod(output.shape) // int(layer.bias.shape[0]), self._states.of(layer)
        layer.pruned.add(1 - prediction.share_kept, layer.size * positions, 1 - prediction.share_computed)

    @amanda.differentiable
    def _prune(self, value: Any, layer: _GatedConvolution, evenly: bool = False) -> Any:
        gate = self._states.of(layer).gate
        if gate is None:
            return value
        gate = as_type_of(normalised_gate(gate) if evenly else gate, value)
        extents = [gate.shape[0]] + [1] * (len(value.shape) - 1)
        extents[layer.layout.index("C")] = gate.shape[1]
        return value * do("reshape", gate, tuple(extents))

    @staticmethod
    @amanda.differentiable
    def _replace_scale_by_ones(scale: Any) -> Any:
        return do("ones_like", scale)


def _is_vector(node: DataflowNode, position: int, layer: _GatedConvolution) -> bool:
    """Return True if an input has one number per channel."""
    shape = node.shapes[position] if position in (0, 1) and position < len(node.shapes) else None
    return shape is not None and prod(extent or 0 for extent in shape) == int(layer.bias.shape[0])
