"""Decisions of attentions: the tokens that one leaves for later layers, and was left by earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from autoray import do

from amanda.tools.dynamic_prune._math import (
    as_type_of,
    binary_gumbel,
    density_count,
    per_token,
    per_unit,
    renormalised,
    stop,
    winners,
)
from amanda.tools.dynamic_prune._result import Pruned
from amanda.tools.kit import DataflowNode, PerCaller, tensors_of


@dataclass(eq=False)
class Attention:
    """An attention.

    heads: where the softmax has batch and heads in one axis.  width: of a head.  previous: the attention
    before it.  skim: parameters of the learned predictor.
    """

    pruned: Pruned
    node: DataflowNode
    heads: int | None
    width: int
    previous: Attention | None
    skim: tuple[Any, ...]


@dataclass(eq=False)
class Decision:
    """The decision of an attention for the last input; at a residual connection `state`, what is added to.

    alive: 0/1, (N, T), the tokens that the attention was given; None for all.  later: those that are left for
    the next.  count: of the units that are left, where each input keeps as many.  carries: True where the
    sequences of later layers are the same, as far as residual connections show: windows of images are others
    in each layer.
    """

    alive: Any = None
    later: Any = None
    count: int = 0
    carries: bool = True
    state: Any = None


@dataclass(frozen=True)
class Skimming:
    """The way in which attentions decide.

    size: tokens of a unit.  protect: so many first tokens stay.  keep: the share that stays, unless it is
    learned.  noise: Gumbel noise like some logits.  present: decisions of the execution under way.
    """

    size: int
    protect: int
    keep: float
    learned: bool
    noise: Callable[[Any], Any]
    present: PerCaller[Decision]

    def attend(self, probabilities: Any, one: Attention) -> Any:
        """Return probabilities without what was dropped, and decide what is dropped next.

        probabilities: (N, H, T, T), or (N * H, T, T).
        """
        if len(probabilities.shape) == 3:
            shape, heads = tuple(probabilities.shape), one.heads or 1
            split = do("reshape", probabilities, (shape[0] // heads, heads, *shape[1:]))
            return do("reshape", self.attend(split, one), shape)
        batch, heads, queries, keys = probabilities.shape
        said = self.present.of(one)
        said.alive = said.later = None
        if queries != keys:
            return probabilities
        previous = None if one.previous is None else self.present.of(one.previous)
        before = previous.later if previous is not None and previous.carries else None
        if before is not None and tuple(before.shape) == (batch, keys):
            said.alive = before
            # A key of which most was attended to would get a gradient without bound.
            alive = as_type_of(stop(before), probabilities)
            probabilities = renormalised(probabilities, alive[:, None, None]) * alive[:, None, :, None]
        macs = 2 * int(batch * heads * queries * keys) * one.width
        if said.alive is None:
            one.pruned.add(0.0, macs, 0.0)
        else:
            shares = do("mean", stop(said.alive), axis=-1)
            one.pruned.add(1 - do("mean", shares), macs, 1 - do("mean", shares**2))
        said.later = self._left(probabilities, one, said, previous)
        return probabilities

    def _left(self, probabilities: Any, one: Attention, said: Decision, previous: Decision | None) -> Any:
        """Return 0/1 of the tokens that are left for later layers: (N, T)."""
        received = do("sum", tensors_of(probabilities).wide(probabilities), axis=-2)
        length = int(received.shape[-1])
        alive = do("ones_like", received[:, 0]) if said.alive is None else said.alive
        units = per_unit(alive, self.size)
        count = int(units.shape[-1])
        if said.alive is not None and previous is not None:
            count = previous.count
        guarded = np.arange(units.shape[-1]) * self.size < self.protect
        first = tensors_of(received).cast(guarded[None].astype(np.float32), received)
        if self.learned:
            hard = self._predicted(probabilities, received, one)
            left = units * (first + (1 - first) * hard)
        else:
            score = stop(per_unit(do("sum", received, axis=1), self.size)) * units
            said.count = max(density_count(self.keep, count), int(guarded.sum()))
            left = winners(score + 1e6 * first + units - 1, said.count) * units
        return per_token(left, self.size, length)

    def _predicted(self, probabilities: Any, received: Any, one: Attention) -> Any:
        """0/1 of the units that the predictor keeps: (N, units)."""
        own = do("diagonal", tensors_of(probabilities).wide(probabilities), axis1=-2, axis2=-1)
        features = per_unit(do("concatenate", (received, own), axis=1), self.size)
        features = do("transpose", as_type_of(features, one.skim[0]), (0, 2, 1))
        weight, bias, last, offset = one.skim
        hidden = features @ weight + bias
        logits = (do("tanh", hidden) @ last + offset)[..., 0]
        return as_type_of(binary_gumbel(logits, self.noise(logits)), received)

    def along(self, attention: Attention, states: Any) -> Any:
        """Return 0/1 of the tokens that an attention was given, (N, T, 1) or (T, N, 1), as their states are.

        Gives None where all are, and where the states are of other sequences than it attended in.
        """
        said = self.present.of(attention)
        if said.later is None:
            return None
        shape, own = tuple(states.shape[:2]), tuple(said.later.shape)
        if said.alive is None or shape not in (own, own[::-1]):
            said.carries = shape in (own, own[::-1])
            return None
        alive = said.alive if shape == own else do("transpose", said.alive, (1, 0))
        return as_type_of(alive, states)[..., None]
