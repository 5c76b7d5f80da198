"""Spatially sparse activations: pruning of positions in residual branches, by their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import amanda
from amanda.options import NonNegativeFloat, PositiveFloat, PositiveShare, Seed, checked
from amanda.tools.dynamic_prune._base import DynamicPruneTool, Run, without_run
from amanda.tools.dynamic_prune._math import as_type_of, binary_gumbel, budget_loss, local, needed, stop
from amanda.tools.dynamic_prune._patterns import residual
from amanda.tools.dynamic_prune._result import Pruned
from amanda.tools.kit import DataflowNode, Window, windows_of
from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import CONVOLUTIONS, spatial_axes

_POINTWISE = frozenset(
    {"batch_norm", "relu", "relu6", "hardtanh", "leaky_relu", "prelu", "elu", "selu", "silu", "gelu", "mish",
     "hardswish", "hardsigmoid", "sigmoid", "tanh", "clamp", "dropout", "BiasAdd", "add", "sub", "mul", "div",
     "to", "Identity", "clone", "contiguous"}
)  # fmt: skip
"""Types of ops that compute each position from the same position of their input, and from vectors."""


@dataclass(eq=False)
class _Convolution:
    """A convolution of a residual branch; size: elements of the kernel."""

    pruned: Pruned
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
        rows, columns = zip(*(one.windows for one in self.convolutions), strict=True)
        return prod(one.stride for one in rows), prod(one.stride for one in columns)


@dataclass(eq=False)
class _Decision:
    """Masks and costs that the mask unit of a branch computed for the last input.

    given, read: 0/1 for the output and input positions of each convolution that are needed; read lacks the
    first convolution, whose input other ops read too.  used, total: multiply-accumulates.
    """

    mask: Any = None
    given: dict[_Convolution, Any] = field(default_factory=dict)
    read: dict[_Convolution, Any] = field(default_factory=dict)
    used: Any = None
    total: int = 0


class ActivationPruneTool(DynamicPruneTool):
    """A tool that prunes positions of residual branches: a branch adds nothing at a pruned position.

    A mask unit chooses the positions for each input, from the input of the branch's first convolution: a 3x3
    convolution plus a linear function of the channels' means.  Inner convolutions compute the positions that
    the next one needs.  In training the mask is sampled (Gumbel, straight through).

    budget: target of `loss()`, a share of the branches' multiply-accumulates.  strength: factor of the loss.
    temperature: of the sigmoid that gives the mask its gradient.  progress: share of the training that is
    done, from 0, where each branch has the budget, to 1, where all branches together have it.

    In PyTorch, and TensorFlow's eager mode, a branch is known once its end has run: the first pass of a model
    is dense, or `prepare` is that pass.
    Source: Verelst & Tuytelaars 2020, "Dynamic convolutions: exploiting spatial sparsity for faster
    inference".
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
        super().__init__(seed, _Decision)
        self._budget, self._strength, self._temperature = budget, strength, temperature

    def loss(self) -> Any:
        """Return strength times the squared distance from the budget, of this thread's last execution."""
        done = [one for one in self._predictions() if one.used is not None]
        if not done:
            return 0.0
        used, total = [one.used for one in done], [one.total for one in done]
        return self._strength * budget_loss(used, total, self._budget, self.progress)

    def _analyse(self, context: amanda.OpContext, node: DataflowNode) -> None:
        if context["type"] in CONVOLUTIONS and context["layout"] in ("NCHW", "NHWC"):
            one = self._convolution(context)
            if one is not None:
                node.notes["convolution"] = one
                given: dict[str, Any] = {"one": one, **without_run(context)}
                context.insert_before_op(self._at_convolution, inputs=[0], **given)
        found = residual(self._flow, node)
        inner = [] if found is None else _convolutions(found.ops)
        if found is not None and inner:
            block = self._block(context, inner)
            context.insert_before_op(self._at_end, inputs=[found.branch], block=block)

    def _convolution(self, context: amanda.OpContext) -> _Convolution | None:
        shape, layout = context["shape"](context.get_inputs()[context["weight_index"]]), context["layout"]
        extents = dict(zip(context["weight_layout"], shape, strict=True))
        try:
            windows = windows_of(context.get_attrs(), layout, (extents["H"], extents["W"]))
        except NotImplementedError:
            return None
        return self._known(context, lambda: _Convolution(
            self._row(context, "positions"), layout, prod(extents.values()), windows
        ))  # fmt: skip

    def _block(self, context: amanda.OpContext, inner: Sequence[tuple[_Convolution, int]]) -> _Block:
        def make() -> _Block:
            channels, unit = inner[0][1], partial(self._trainable, context, context.get_inputs()[0])
            block = _Block(
                [one for one, _ in inner],
                unit("mask.kernel", lambda: self._uniform(9 * channels, 3, 3, channels)),
                unit("mask.weight", lambda: self._uniform(channels, channels, 1)),
                unit("mask.bias", lambda: np.zeros(1)),
            )
            for one, _ in inner:
                one.block = block
            return block

        return self._known(context, make)

    def _uniform(self, fan_in: int, *shape: int) -> Any:
        return self._first.uniform(-(fan_in**-0.5), fan_in**-0.5, shape)

    @amanda.differentiable
    def _at_convolution(self, x: Any, one: _Convolution, run: Run, recomputed: bool) -> Any:
        block = one.block
        if block is None:
            return None
        if block.convolutions[0] is one:
            self._decide(x, block, run, recomputed)
        decision = self._present.of(block)
        given, read = decision.given.get(one), decision.read.get(one)
        if given is None:
            return None
        kept = do("mean", stop(given))
        if not recomputed:
            one.pruned.add(1 - kept, one.size * prod(given.shape), 1 - kept)
        return None if read is None else _masked(x, read, one.layout)

    @amanda.differentiable
    def _at_end(self, branch: Any, block: _Block) -> Any:
        mask = self._present.of(block).mask
        return None if mask is None else _masked(branch, mask, block.convolutions[-1].layout)

    def _decide(self, x: Any, block: _Block, run: Run, recomputed: bool) -> None:
        """Compute the masks of a branch from its input."""
        decision, layout = self._present.of(block), block.convolutions[0].layout
        x = as_type_of(x, block.kernel)
        logits = local(x, block.kernel, block.stride, layout)
        mean = do("mean", x, axis=tuple(spatial_axes(layout))) @ block.weight + block.bias
        logits = logits + mean[:, :, None]
        mask = decision.mask = binary_gumbel(logits, self._noise(logits, run, recomputed), self._temperature)
        sizes = [[int(x.shape[axis]) for axis in spatial_axes(layout)]]
        for one in block.convolutions[:-1]:
            sizes.append([at.places(size) for at, size in zip(one.windows, sizes[-1], strict=True)])
        used: Any = 0.0
        decision.total = 0
        for one, size in zip(reversed(block.convolutions), reversed(sizes), strict=True):
            macs = one.size * prod(mask.shape)
            used, decision.total = used + macs * do("mean", mask), decision.total + macs
            decision.given[one], mask = mask, needed(mask, one.windows, size)
            if one is not block.convolutions[0]:
                decision.read[one] = mask
        decision.used = used


def _convolutions(ops: Sequence[DataflowNode]) -> list[tuple[_Convolution, int]]:
    """Return the convolutions at the end of a branch, in order, each with the number of its input channels.

    All ops between them are pointwise.
    """
    found: list[tuple[_Convolution, int]] = []
    for node in ops:
        one = node.notes.get("convolution")
        if one is not None:
            channels = (node.shapes[0] or ())[one.layout.index("C")]
            found.insert(0, (one, channels or 0))
        elif node.type not in _POINTWISE or not _reads_vectors(node):
            break
    return found


def _reads_vectors(node: DataflowNode) -> bool:
    """Return True if all inputs of an op but the first are vectors or numbers."""
    return all(sum(one != 1 for one in shape) <= 1 for shape in node.shapes[1:] if shape is not None)


def _masked(value: Any, mask: Any, layout: str) -> Any:
    """Return a value times a mask of positions."""
    mask = as_type_of(mask, value)
    return value * (mask[:, None] if layout.index("C") == 1 else mask[..., None])
