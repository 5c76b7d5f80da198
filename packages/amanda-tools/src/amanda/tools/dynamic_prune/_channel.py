"""Feature boosting and suppression: channels of convolutions are pruned by what is convolved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from autoray import astype, do, get_dtype_name

import amanda
from amanda.tools.dynamic_prune._base import DynamicPruneTool, checked_share, row, spatial_axes
from amanda.tools.dynamic_prune._flow import Node
from amanda.tools.dynamic_prune._math import (
    density_count,
    indicator,
    saliency,
    shares,
    stop,
    subsample,
    winners,
)
from amanda.tools.dynamic_prune._result import Pruned
from amanda.tools.kit import Latest

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "depthwise_conv2d")
_NORMS = ("batch_norm", "instance_norm", "group_norm")
_MOMENTS = ("SquaredDifference", "StopGradient", "Shape")


@dataclass(eq=False)
class _Layer:
    """A convolution and its predictor.

    size: elements of the kernel.  latest: of the last input the saliency and the gate that the channels are
    multiplied by, both (N, C), the share of the channels that are kept, and the share of the products, since
    zeros of the input need none.
    """

    pruned: Pruned
    layout: str
    weight: Any
    bias: Any
    size: int
    latest: Latest

    @property
    def axis(self) -> int:
        """Of the channels."""
        return self.layout.index("C")


class DynamicChannelPruneTool(DynamicPruneTool):
    """Multiplies each channel that a convolution gives by its predicted saliency, and most of them by zero.

    The saliency is a linear function of the mean magnitudes of the input's channels; the share `density` of
    the channels, those of the largest, is kept for each input.  Behind a convolution with a normalisation
    it takes the place of the normalisation's scale. Else it multiplies what the convolution gives, divided by
    its mean over the channels that are kept: nothing else would hold activations that are multiplied by
    their own size.

    penalty: of the mean saliencies, in `loss()`.
    Source: Gao et al. 2019, "Dynamic channel pruning: feature boosting and suppression".
    """

    def __init__(self, density: float = 0.5, penalty: float = 1e-8, seed: int = 0) -> None:
        super().__init__(seed)
        self._density, self._penalty = checked_share("density", density), penalty
        self._layers: dict[str, _Layer] = {}
        self.add_inst_for_op(self._look)
        self.add_inst_for_op(self._note, require_outputs=True)

    def loss(self) -> Any:
        """penalty times the mean over the batch of the sum of the saliencies, of all convolutions."""
        said = [one for layer in self._layers.values() if (one := layer.latest.saliency) is not None]
        return self._penalty * sum(do("sum", do("mean", one, axis=0)) for one in said) if said else 0.0

    def clear(self) -> None:
        """Forget what was pruned, and the saliencies of the last execution."""
        super().clear()
        for layer in self._layers.values():
            layer.latest.clear()

    def _forget(self) -> None:
        self._layers.clear()

    def _pruned(self) -> Iterable[Pruned]:
        return (layer.pruned for layer in self._layers.values())

    # ---- analysis ----

    def _look(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        node = context["node"] = self._flow.node(context)
        for position, number in enumerate(node.inputs):
            maker = self._flow.maker(number)
            if maker is not None and "layer" in maker.notes:
                self._gate_at(context, node, position, maker.notes)
        if context["type"] in _CONVOLUTIONS and "N" in (context["layout"] or ""):
            layer = node.notes["layer"] = self._layer(context)
            context.insert_before_op(self._predict, inputs=[0], layer=layer)
            context.insert_after_op(self._count, outputs=[0], layer=layer)

    def _note(self, context: amanda.OpContext) -> None:
        if context["phase"] == "forward":
            self._flow.made(context["node"], context.get_outputs() or [])

    def _gate_at(self, context: amanda.OpContext, node: Node, position: int, notes: dict[str, Any]) -> None:
        """Decide where the channels of a convolution are pruned, at an op that reads them."""
        kind, layer = context["type"], notes["layer"]
        with_vector = kind in ("BiasAdd", "mul", "add") and _is_vector(node, 1 - position, layer)
        if kind in _NORMS and position == 0:
            if context["weight_index"] is not None:
                context.insert_before_op(self._ones, inputs=[context["weight_index"]])
            context.insert_after_op(self._prune, outputs=[0], layer=layer)
        elif with_vector and kind == "add" and notes.get("scaled"):
            context.insert_after_op(self._prune, layer=layer)
        elif with_vector and kind != "add":
            node.notes.update(layer=layer, scaled=kind == "mul")
        elif kind not in _MOMENTS and not context.get_attrs().get("keep_dims"):
            context.insert_before_op(self._prune, inputs=[position], layer=layer, evenly=True)

    def _layer(self, context: amanda.OpContext) -> _Layer:
        if self.place(context) not in self._layers:
            index, layout = context["weight_index"], context["layout"]
            x, kernel = context.get_inputs()[0], context.get_inputs()[index]
            extents = dict(zip(context["weight_layout"], context["shape"](kernel), strict=True))
            given = context["shape"](x)[layout.index("C")]
            made = extents["O"] if "O" in extents else extents["I"] * extents["M"]
            self._layers[self.place(context)] = _Layer(
                Pruned(context["type"], context.get_scope(), context.get_source(), "channels"),
                layout,
                self._trainable(context, "saliency.weight", x, lambda: self._weight(given, made)),
                self._trainable(context, "saliency.bias", x, lambda: np.ones(made, np.float32)),
                prod(extents.values()),
                Latest(context),
            )
        return self._layers[self.place(context)]

    def _weight(self, given: int, made: int) -> Any:
        """A tenth of what He et al. 2015 initialise with: a trained model begins near what it was."""
        return self._first.normal(0, 0.1 * (2 / given) ** 0.5, (given, made)).astype(np.float32)

    # ---- execution ----

    @amanda.differentiable
    def _predict(self, x: Any, layer: _Layer) -> None:
        squeezed = subsample(x, spatial_axes(layer.layout))
        squeezed = astype(squeezed, get_dtype_name(layer.weight))
        latest = layer.latest
        latest.saliency = saliency(squeezed, layer.weight, layer.bias)
        kept = winners(latest.saliency, density_count(self._density, int(layer.bias.shape[0])))
        latest.gate = latest.saliency * kept
        given = do("mean", indicator(stop(latest.gate) > 0, kept), axis=-1)
        read = do("mean", indicator(stop(squeezed) > 0, kept), axis=-1)
        latest.kept, latest.computed = do("mean", given), do("mean", given * read)

    @amanda.observer
    def _count(self, made: Any, layer: _Layer) -> None:
        positions = prod(made.shape) // int(layer.bias.shape[0])
        layer.pruned.add(1 - layer.latest.kept, layer.size * positions, 1 - layer.latest.computed)

    @amanda.differentiable
    def _prune(self, value: Any, layer: _Layer, evenly: bool = False) -> Any:
        gate = layer.latest.gate
        if gate is None:
            return value
        gate = astype(shares(gate) if evenly else gate, get_dtype_name(value))
        return value * row(gate, layer.axis, len(value.shape))

    @staticmethod
    @amanda.differentiable
    def _ones(scale: Any) -> Any:
        return do("ones_like", scale)


def _is_vector(node: Node, position: int, layer: _Layer) -> bool:
    """Return True if an input has one number for each channel."""
    shape = node.shapes[position] if position in (0, 1) and position < len(node.shapes) else None
    return shape is not None and prod(one or 0 for one in shape) == int(layer.bias.shape[0])
