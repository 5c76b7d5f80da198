"""Dynamic pruning of convolutions: of channels by saliency, and of positions in residual branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import amanda
from amanda.options import NonNegativeFloat, PositiveFloat, PositiveShare, Seed, checked
from amanda.tools.axes import Window, windows_of
from amanda.tools.dataflow import DataflowNode
from amanda.tools.dynamic_prune._base import DynamicPruneTool, PrunedOp, Run, residual_at, without_run
from amanda.tools.dynamic_prune._math import (
    as_type_of,
    binary_gumbel,
    budget_loss,
    convolve_3x3,
    density_count,
    detached,
    needed_inputs,
    normalised_gate,
    saliency,
    top_mask,
)
from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, spatial_axes

_NORMS = ("batch_norm", "instance_norm", "group_norm")
_MOMENTS = ("SquaredDifference", "StopGradient", "Shape")
"""Types of ops by which TensorFlow computes the mean and variance of a normalisation."""


@dataclass(eq=False)
class _GatedConvolution:
    """A convolution, and weight and bias of its predictor; size: elements of the convolution's kernel."""

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

    Source: Gao et al. 2019, "Dynamic channel pruning: feature boosting and suppression".

    Args:
        density: Share of channels that each input keeps.
        penalty: Factor of the mean saliencies in `loss()`.
        seed: Seed of the predictors' initial values.
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
        if not saliencies:
            return 0.0
        return self._penalty * sum(do("sum", do("mean", values, axis=0)) for values in saliencies)

    def _analyse(self, context: amanda.OpContext, node: DataflowNode) -> None:
        """Insert predictor and count of MACs at a convolution, and its gate at ops that read the output."""
        for position, number in enumerate(node.inputs):
            maker = self._flow.maker(number)
            if maker is not None and "layer" in maker.notes:
                self._insert_gate(context, node, position, maker.notes)
        if context["type"] in CONVOLUTIONS and "N" in (context["layout"] or ""):
            layer = node.notes["layer"] = self._gated_convolution(context)
            context.insert_before_op(self._predict_gate, inputs=[0], layer=layer)
            context.insert_after_op(self._count_macs, outputs=[0], layer=layer)

    def _insert_gate(
        self, context: amanda.OpContext, node: DataflowNode, position: int, notes: dict[str, Any]
    ) -> None:
        """Insert the pruning of a convolution's channels at an op that reads them, or behind a normalisation.

        An op of a normalisation hands the notes on to the next op instead; those of its moments stay as they
        are.
        notes: "layer", the convolution whose output reaches the op ungated; "scaled", True behind a scale.
        """
        kind, layer = context["type"], notes["layer"]
        has_vector_operand = kind in ("BiasAdd", "mul", "add") and _is_vector(node, 1 - position, layer)
        is_moment = kind in _MOMENTS or context.get_attrs().get("keep_dims")
        if kind in _NORMS and position == 0:
            # The normalisation would undo a factor before it, so that the saliency takes the place of the
            # scale behind it.
            if context["weight_index"] is not None:
                weight = context["weight_index"]
                context.insert_before_op(self._replace_scale_by_ones, inputs=[0, weight], layer=layer)
            context.insert_after_op(self._apply_gate, outputs=[0], layer=layer)
        elif has_vector_operand and kind == "add" and notes.get("scaled"):
            # The last op of a normalisation that TensorFlow splits into mul and add by vectors.
            context.insert_after_op(self._apply_gate, layer=layer)
        elif has_vector_operand and kind != "add":
            # An earlier one: the gate waits for the last.
            node.notes.update(layer=layer, scaled=kind == "mul")
        elif not is_moment:  # ops of the mean and variance of a normalisation read the ungated output
            context.insert_before_op(self._apply_gate, inputs=[position], layer=layer, evenly=True)

    def _gated_convolution(self, context: amanda.OpContext) -> _GatedConvolution:
        """Return the record of a convolution, with the parameters of its predictor."""
        x, kernel = context.get_inputs()[0], context.get_inputs()[context["weight_index"]]
        extents = dict(zip(context["weight_layout"], context["shape"](kernel), strict=True))
        in_channels = context["shape"](x)[context["layout"].index("C")]
        # A depthwise kernel has M outputs for each input.
        out_channels = extents["O"] if "O" in extents else extents["I"] * extents["M"]

        def initial_weight() -> Any:
            # A tenth of what He et al. 2015 initialise with: a trained model begins near what it was.
            deviation = 0.1 * (2 / in_channels) ** 0.5
            return self._initial_random.normal(0, deviation, (in_channels, out_channels))

        return self._op_record(context, lambda: _GatedConvolution(
            pruned=self._add_row(context, "channels"),
            layout=context["layout"],
            weight=self._keep_parameter(context, x, "saliency.weight", initial_weight),
            bias=self._keep_parameter(context, x, "saliency.bias", lambda: np.ones(out_channels)),
            size=prod(extents.values()),
        ))  # fmt: skip

    @amanda.differentiable
    def _predict_gate(self, x: Any, layer: _GatedConvolution) -> None:
        """Compute saliencies and gate of a convolution from its input; none within a transform."""
        prediction = self._states.state_of(layer)
        if self._is_transformed(x, layer.pruned):
            prediction.gate = prediction.saliency = None
            return
        channel_means = do("mean", do("abs", x), axis=tuple(spatial_axes(layer.layout)))  # of Gao et al.
        # Predictors are in float32 under mixed precision.
        channel_means = as_type_of(channel_means, layer.weight)
        prediction.saliency = saliency(channel_means, layer.weight, layer.bias)
        count = density_count(self._density, int(layer.bias.shape[0]))
        keep_mask = top_mask(prediction.saliency, count)
        prediction.gate = prediction.saliency * keep_mask
        share_kept = do("mean", as_type_of(detached(prediction.gate) > 0, keep_mask), axis=-1)
        # Input channels that are 0, as pruned ones of the layer before, need no products either.
        share_nonzero = do("mean", as_type_of(detached(channel_means) > 0, keep_mask), axis=-1)
        prediction.share_kept = do("mean", share_kept)
        prediction.share_computed = do("mean", share_kept * share_nonzero)

    @amanda.observer
    def _count_macs(self, output: Any, layer: _GatedConvolution) -> None:
        """Add an execution to the result, with the share of products that its gate saves, if it has one."""
        prediction = self._states.state_of(layer)
        if prediction.gate is None:
            return
        out_channels = int(layer.bias.shape[0])
        macs = layer.size * (prod(output.shape) // out_channels)  # size: of the kernel
        layer.pruned.add(1 - prediction.share_kept, macs, 1 - prediction.share_computed)

    @amanda.differentiable
    def _apply_gate(self, value: Any, layer: _GatedConvolution, evenly: bool = False) -> Any:
        """Return a value times the gate of its channels; the value itself without a gate or in a transform.

        evenly: True to divide the gate by its mean over the kept channels.
        """
        gate = self._states.state_of(layer).gate
        # The convolution has not run in this execution, as in a branch of the program that was skipped.
        if gate is None or self._is_transformed(value, layer.pruned):
            return value
        # Without a normalisation behind, activations would shrink or grow with the gate from layer to layer.
        gate = as_type_of(normalised_gate(gate) if evenly else gate, value)
        extents = [gate.shape[0]] + [1] * (len(value.shape) - 1)
        extents[layer.layout.index("C")] = gate.shape[1]
        return value * do("reshape", gate, tuple(extents))

    @amanda.differentiable
    def _replace_scale_by_ones(self, value: Any, scale: Any, layer: _GatedConvolution) -> Any:
        """Return the value, and ones in place of a normalisation's scale; None, for no change, if ungated."""
        if self._states.state_of(layer).gate is None or self._is_transformed(value, layer.pruned):
            return None
        return value, do("ones_like", scale)


def _is_vector(node: DataflowNode, position: int, layer: _GatedConvolution) -> bool:
    """Return True if an input has one number per channel."""
    shape = node.shapes[position] if position in (0, 1) and position < len(node.shapes) else None
    return shape is not None and prod(extent or 0 for extent in shape) == int(layer.bias.shape[0])


_POINTWISE = frozenset(
    {"batch_norm", "relu", "relu6", "hardtanh", "leaky_relu", "prelu", "elu", "selu", "silu", "gelu", "mish",
     "hardswish", "hardsigmoid", "sigmoid", "tanh", "clamp", "dropout", "BiasAdd", "add", "sub", "mul", "div",
     "to", "Identity", "clone", "contiguous"}
)  # fmt: skip
"""Types of ops that compute each position from the same position of their input, and from vectors."""


@dataclass(eq=False)
class _Convolution:
    """A convolution of a residual branch; size: elements of the kernel."""

    pruned: PrunedOp
    layout: str
    size: int
    windows: Sequence[Window]
    block: _Block | None = None


@dataclass(eq=False)
class _Block:
    """A residual branch: its convolutions, and the mask unit."""

    convolutions: Sequence[_Convolution]
    kernel: Any
    weight: Any
    bias: Any

    @property
    def stride(self) -> tuple[int, int]:
        """Return the stride of the whole branch."""
        rows, columns = zip(*(convolution.windows for convolution in self.convolutions), strict=True)
        return prod(window.stride for window in rows), prod(window.stride for window in columns)


@dataclass(eq=False)
class _BranchMasks:
    """Masks and costs that the mask unit of a branch computed for the last input.

    output_masks, input_masks: 0/1 for the output and input positions that each convolution needs; input_masks
    lacks the first convolution, whose input other ops read too.  macs_used, macs_dense: multiply-accumulates
    of the needed positions, and of all.
    """

    mask: Any = None
    output_masks: dict[_Convolution, Any] = field(default_factory=dict)
    input_masks: dict[_Convolution, Any] = field(default_factory=dict)
    macs_used: Any = None
    macs_dense: int = 0

    def forget(self) -> None:
        """Forget the decision for the last input."""
        self.mask = self.macs_used = None
        self.output_masks, self.input_masks, self.macs_dense = {}, {}, 0


class ActivationPruneTool(DynamicPruneTool):
    """Skip residual branches at the least important spatial positions of each input.

    A branch adds nothing at a pruned position.  A mask unit selects the positions from the input of the first
    convolution: a 3x3 convolution plus a linear function of the channel means.  Inner convolutions keep the
    positions that the next convolution reads.  In training the mask is sampled (Gumbel, straight through).

    In PyTorch, and in TensorFlow's eager mode, a branch is recognised when its last op runs, so the first
    pass of a model is dense; `prepare` may be that pass.

    The attribute `progress` is the finished share of the training: at 0 the budget binds each branch, at 1
    (the default) only all branches together.

    Source: Verelst & Tuytelaars 2020, "Dynamic convolutions: exploiting spatial sparsity for faster
    inference".

    Args:
        budget: Share of the branches' multiply-accumulates that `loss()` aims at.
        strength: Factor of `loss()`.
        temperature: Of the mask's sigmoid, for its gradient.
        seed: Of mask units and training noise.
    """

    progress = 1.0

    @checked
    def __init__(
        self,
        budget: PositiveShare = 0.5,
        strength: NonNegativeFloat = 10.0,
        temperature: PositiveFloat = 1.0,
        seed: Seed = 0,
    ) -> None:
        super().__init__(seed, _BranchMasks)
        self._budget, self._strength, self._temperature = budget, strength, temperature

    def loss(self) -> Any:
        """Return strength times `budget_loss` of this thread's last execution; 0.0 without masks."""
        decisions = [decision for decision in self._predictions() if decision.macs_used is not None]
        if not decisions:
            return 0.0
        macs_used = [decision.macs_used for decision in decisions]
        macs_dense = [decision.macs_dense for decision in decisions]
        return self._strength * budget_loss(macs_used, macs_dense, self._budget, self.progress)

    def _analyse(self, context: amanda.OpContext, node: DataflowNode) -> None:
        """Insert the masks of a convolution's input, and that of a branch where the op ends one."""
        if context["type"] in CONVOLUTIONS and context["layout"] in ("NCHW", "NHWC"):
            convolution = self._convolution_record(context)
            if convolution is not None:
                node.notes["convolution"] = convolution
                keywords: dict[str, Any] = {"convolution": convolution, **without_run(context)}
                context.insert_before_op(self._mask_input, inputs=[0], **keywords)
        connection = residual_at(self._flow, node)
        convolutions = [] if connection is None else _trailing_convolutions(connection.ops)
        if connection is not None and convolutions:
            block = self._block_record(context, convolutions)
            context.insert_before_op(self._mask_branch, inputs=[connection.branch], block=block)

    def _convolution_record(self, context: amanda.OpContext) -> _Convolution | None:
        """Return the record of a convolution; None for a transposed one."""
        shape, layout = context["shape"](context.get_inputs()[context["weight_index"]]), context["layout"]
        # By letters of the layout, as frameworks order the axes of kernels differently.
        extents = dict(zip(context["weight_layout"], shape, strict=True))
        try:
            windows = windows_of(context.get_attrs(), layout, (extents["H"], extents["W"]))
        # A transposed convolution writes windows instead of reading them.
        except NotImplementedError:
            return None
        return self._op_record(context, lambda: _Convolution(
            self._add_row(context, "positions"), layout, prod(extents.values()), windows
        ))  # fmt: skip

    def _block_record(
        self, context: amanda.OpContext, convolutions: Sequence[tuple[_Convolution, int]]
    ) -> _Block:
        """Return the record of a branch, with the parameters of its mask unit."""

        def make() -> _Block:
            """Create the record, and link the convolutions to it."""
            _, channels = convolutions[0]  # of the branch's input
            parameter = partial(self._keep_parameter, context, context.get_inputs()[0])
            block = _Block(
                [convolution for convolution, _ in convolutions],
                parameter("mask.kernel", lambda: self._draw_uniform((3, 3, channels), fan_in=9 * channels)),
                parameter("mask.weight", lambda: self._draw_uniform((channels, 1), fan_in=channels)),
                parameter("mask.bias", lambda: np.zeros(1)),
            )
            for convolution, _ in convolutions:
                convolution.block = block
            return block

        return self._op_record(context, make)

    def _draw_uniform(self, shape: tuple[int, ...], fan_in: int) -> Any:
        """Return random numbers within the inverse root of the fan-in, as layers of PyTorch begin with."""
        return self._initial_random.uniform(-(fan_in**-0.5), fan_in**-0.5, shape)

    @amanda.differentiable
    def _mask_input(self, x: Any, convolution: _Convolution, run: Run, recomputed: bool) -> Any:
        """Predict masks at the first convolution of a branch; return the part of the input that is needed.

        Returns None, for no change, for a convolution of no branch, for the first one, and in a transform.
        Adds the execution to the result unless it is `recomputed`.
        """
        block = convolution.block
        if block is None:
            return None
        # The mask unit runs at the first convolution, and later ones of the branch use what it decided.
        if self._is_transformed(x, convolution.pruned):
            self._states.state_of(block).forget()
        elif block.convolutions[0] is convolution:
            self._predict_masks(x, block, run, recomputed)
        decision = self._states.state_of(block)
        output_mask = decision.output_masks.get(convolution)
        input_mask = decision.input_masks.get(convolution)  # None for the first convolution
        if output_mask is None:  # no mask was predicted, as within a transform
            return None
        share_computed = do("mean", detached(output_mask))
        if not recomputed:
            convolution.pruned.add(
                1 - share_computed, convolution.size * prod(output_mask.shape), 1 - share_computed
            )
        return None if input_mask is None else _masked(x, input_mask, convolution.layout)

    @amanda.differentiable
    def _mask_branch(self, branch: Any, block: _Block) -> Any:
        """Return a branch with 0 at skipped positions; None, for no change, without a mask."""
        mask = self._states.state_of(block).mask
        if mask is None or self._is_transformed(branch, block.convolutions[0].pruned):
            return None
        return _masked(branch, mask, block.convolutions[-1].layout)

    def _predict_masks(self, x: Any, block: _Block, run: Run, recomputed: bool) -> None:
        """Compute the masks of all convolutions of a branch from its input, and the MACs that remain."""
        decision, layout = self._states.state_of(block), block.convolutions[0].layout
        mask = decision.mask = self._predict_output_mask(x, block, run, recomputed)
        # Of each convolution: it gives the next one as many positions as its windows have places.
        input_sizes = [[int(x.shape[axis]) for axis in spatial_axes(layout)]]
        for convolution in block.convolutions[:-1]:
            windows_and_sizes = zip(convolution.windows, input_sizes[-1], strict=True)
            input_sizes.append([window.places(size) for window, size in windows_and_sizes])
        macs_used: Any = 0.0
        decision.macs_dense = 0
        # Backwards from the output, whose mask it is at first: each convolution has to compute what the next
        # one reads.
        for convolution, size in zip(reversed(block.convolutions), reversed(input_sizes), strict=True):
            macs = convolution.size * prod(mask.shape)
            macs_used = macs_used + macs * do("mean", mask)
            decision.macs_dense += macs
            decision.output_masks[convolution] = mask
            mask = needed_inputs(mask, convolution.windows, size)
            # Its input is the state of the residual connection too, which stays whole.
            if convolution is not block.convolutions[0]:
                decision.input_masks[convolution] = mask
        decision.macs_used = macs_used

    def _predict_output_mask(self, x: Any, block: _Block, run: Run, recomputed: bool) -> Any:
        """Return the mask of the positions of a branch's output, from its input."""
        layout = block.convolutions[0].layout
        x = as_type_of(x, block.kernel)
        logits = convolve_3x3(x, block.kernel, block.stride, layout)
        offset = do("mean", x, axis=tuple(spatial_axes(layout))) @ block.weight + block.bias
        # One number for each example, (N, 1, 1), is added at all positions.
        logits = logits + offset[:, :, None]
        return binary_gumbel(logits, self._draw_noise(logits, run, recomputed), self._temperature)


def _trailing_convolutions(ops: Sequence[DataflowNode]) -> list[tuple[_Convolution, int]]:
    """Return the convolutions at the end of a branch, in order, each with the number of its input channels.

    All ops between them are pointwise.  ops: of the branch, the last first.
    """
    convolutions: list[tuple[_Convolution, int]] = []
    for node in ops:
        convolution = node.notes.get("convolution")
        if convolution is not None:
            # Of an input of unknown shape no channels are counted.
            shape = node.shapes[0]
            channels = shape[convolution.layout.index("C")] if shape else 0
            # The ops of a branch come last first.
            convolutions.insert(0, (convolution, channels or 0))
        elif node.type not in _POINTWISE or not _reads_vectors(node):
            break
    return convolutions


def _reads_vectors(node: DataflowNode) -> bool:
    """Return True if all inputs of an op but the first are vectors or numbers."""
    return all(sum(extent != 1 for extent in shape) <= 1 for shape in node.shapes[1:] if shape is not None)


def _masked(value: Any, mask: Any, layout: str) -> Any:
    """Return a value times a mask of positions."""
    mask = as_type_of(mask, value)
    return value * (mask[:, None] if layout.index("C") == 1 else mask[..., None])
