"""Token skimming: attention chooses tokens, or blocks of tokens, that later layers drop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import amanda
from amanda.options import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, Range, Seed, checked
from amanda.tools.dynamic_prune._base import DynamicPruneTool, Run, without_run
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
from amanda.tools.dynamic_prune._patterns import (
    LAYERS,
    Residual,
    head_count,
    is_of_one_sequence,
    residual,
    scores_of,
)
from amanda.tools.dynamic_prune._pytorch import ATTENTIONS
from amanda.tools.dynamic_prune._result import DynamicPruneResult, Pruned
from amanda.tools.kit import DataflowNode, tensors_of
from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import backend_of

_PASSING = frozenset({"dropout", "to", "Identity", "clone", "contiguous"})
_FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")


@dataclass(eq=False)
class _Attention:
    """An attention.

    heads: number of heads if batch and heads share an axis in the softmax, else None.  width: of a head.
    previous: the attention before this one.  skim: parameters of the learned predictor.
    """

    pruned: Pruned
    node: DataflowNode
    heads: int | None
    width: int
    previous: _Attention | None
    skim: tuple[Any, ...]


@dataclass(eq=False)
class _Decision:
    """The decision of an attention for the last input.

    alive: 0/1, (N, T), of the tokens that reach the attention; None for all.  later: of those that reach the
    next one.  count: number of units in `later`, if it is the same for each input.  carries: whether later
    layers have the same sequences, as far as residual connections show; windows of images differ by layer.
    state: at a residual connection, the tensor that the branch is added to.
    """

    alive: Any = None
    later: Any = None
    count: int = 0
    carries: bool = True
    state: Any = None


@dataclass(eq=False)
class _Sum:
    """A residual connection behind an attention.

    is_normed: whether the branch is added to the output of a normalisation; then the normalisation that
    follows restores the state of dropped tokens.
    """

    attention: _Attention
    is_normed: bool


class AttentionPruneTool(DynamicPruneTool):
    """A tool that drops tokens from later layers, by the attention that they receive.

    unit: "token", or "block" of `block` adjacent tokens.  by: "attention": each attention keeps the share
    `keep` of its tokens that all heads and queries together attend to most; "learned": a predictor of two
    layers chooses, from the attention that a token receives and pays to itself in each head; then `keep` is
    the target of `loss()`, the mean share of tokens in all attentions.
    protect: number of first tokens that are always kept.  strength: factor of the loss.  hidden: neurons of
    the predictor.

    A dropped token is neither key nor query of later attentions, and residual connections keep its state.
    In training learned decisions are sampled (Gumbel, straight through).
    Sources: Guan et al. 2022, "Block-skim" and "Transkimmer"; Goyal et al. 2020, "PoWER-BERT", for the score.
    """

    @checked
    def __init__(
        self,
        unit: Literal["token", "block"] = "token",
        by: Literal["attention", "learned"] = "attention",
        keep: PositiveShare = 0.7,
        block: PositiveInt = 4,
        protect: NonNegativeInt = 1,
        strength: NonNegativeFloat = 1.0,
        hidden: Annotated[int, Range(1, 65_536)] = 16,
        seed: Seed = 0,
    ) -> None:
        super().__init__(seed, _Decision)
        self._size, self._protect, self._hidden = block if unit == "block" else 1, protect, hidden
        self._share, self._strength, self._learned = keep, strength, by == "learned"
        self._fused: set[str] = set()

    @property
    def result(self) -> DynamicPruneResult:
        """Return the result so far; MACs are those of the products of queries, keys and values."""
        notes = [f"{name} is one op: what attends in it was left as it is." for name in sorted(self._fused)]
        return DynamicPruneResult(self._rows.values(), notes)

    def loss(self) -> Any:
        """Return strength times the squared distance from `keep` of the mean share of attentions' tokens."""
        ran = [decision for decision in self._predictions() if decision.later is not None]
        if not ran or not self._learned:
            return 0.0
        share = sum(1.0 if one.alive is None else do("mean", one.alive) for one in ran) / len(ran)
        return self._strength * (share - self._share) ** 2

    def _analyse(self, context: amanda.OpContext, node: DataflowNode) -> None:
        kind = context["type"]
        if kind in _FUSED:
            self._fused.add(kind)
        elif kind == "scaled_dot_product_attention" and is_of_one_sequence(self._flow, node):
            attend = ATTENTIONS.get(backend_of(context.get_inputs()[0]))
            if attend is None:
                self._fused.add(kind)
                return
            one = self._attention(context, node, node)
            context.replace_op(partial(attend, partial(self._attend, one=one)), **without_run(context))
        elif kind == "softmax" and (product := scores_of(self._flow, node)) is not None:
            if not is_of_one_sequence(self._flow, product):
                return
            one = self._attention(context, node, product)
            context.insert_after_op(self._prune, outputs=[0], one=one, **without_run(context))
        elif (found := residual(self._flow, node)) is not None:
            self._look_at_sum(context, node, found)
        elif kind == "layer_norm":
            added = self._flow.maker(node.inputs[0])
            if added is not None and "sum" in added.notes:
                context.insert_after_op(self._restore, outputs=[0], node=node, one=added.notes["sum"])

    def _attention(self, context: amanda.OpContext, node: DataflowNode, product: DataflowNode) -> _Attention:
        scores, given = node.shapes[0] or (), product.shapes[0] or ()
        heads = head_count(self._flow, product, scores) if node is not product and len(scores) == 3 else None
        count = heads or (scores[1] if len(scores) == 4 else 1) or 1
        size, learned = self._size, self._learned
        one = self._known(context, lambda: _Attention(
            self._row(context, "tokens" if size == 1 else f"blocks of {size}"), node, heads,
            given[-1] or 0 if given else 0, self._flow.nearest(node.reads, "attention"),
            self._skim(context, count) if learned else (),
        ))  # fmt: skip
        node.notes["attention"] = one
        one.node = node
        return one

    def _skim(self, context: amanda.OpContext, heads: int) -> tuple[Any, ...]:
        """Return the predictor's parameters; the initial bias keeps all tokens."""
        like, width, hidden, normal = context.get_inputs()[0], 2 * heads, self._hidden, self._first.normal
        makers = {
            "skim.hidden.weight": lambda: normal(0, width**-0.5, (width, hidden)),
            "skim.hidden.bias": lambda: np.zeros(hidden),
            "skim.weight": lambda: normal(0, 0.1 * hidden**-0.5, (hidden, 1)),
            "skim.bias": lambda: np.ones(1),
        }
        return tuple(self._trainable(context, like, name, make) for name, make in makers.items())

    def _look_at_sum(self, context: amanda.OpContext, node: DataflowNode, found: Residual) -> None:
        attention = self._flow.nearest([node.inputs[found.branch]], "attention")
        products = [one for one in found.ops if one.type in LAYERS]
        if attention is None or not products:
            return
        made_by = (one.type for _, one in self._flow.back(found.identity) if one is not None)
        is_normed = next((one for one in made_by if one not in _PASSING), None) == "layer_norm"
        one = node.notes["sum"] = _Sum(attention, is_normed)
        context.insert_before_op(self._hold, inputs=[found.branch, 1 - found.branch], one=one)

    @amanda.differentiable
    def _prune(self, probabilities: Any, one: _Attention, run: Run, recomputed: bool) -> Any:
        pruned = self._attend(probabilities, one, run, recomputed)
        self._flow.made(one.node, [pruned])
        return pruned

    def _attend(self, probabilities: Any, one: _Attention, run: Run, recomputed: bool) -> Any:
        """Return probabilities without dropped tokens, and choose the tokens to drop next.

        probabilities: (N, H, T, T), or (N * H, T, T).
        """
        if len(probabilities.shape) == 3:
            shape, heads = tuple(probabilities.shape), one.heads or 1
            split = do("reshape", probabilities, (shape[0] // heads, heads, *shape[1:]))
            return do("reshape", self._attend(split, one, run, recomputed), shape)
        batch, heads, queries, keys = probabilities.shape
        decision = self._present.of(one)
        decision.alive = decision.later = None
        if queries != keys:
            return probabilities
        previous = None if one.previous is None else self._present.of(one.previous)
        before = previous.later if previous is not None and previous.carries else None
        if before is not None and tuple(before.shape) == (batch, keys):
            decision.alive = before
            # Without `stop`, a key that took most attention would get an unbounded gradient.
            alive = as_type_of(stop(before), probabilities)
            probabilities = renormalised(probabilities, alive[:, None, None]) * alive[:, None, :, None]
        macs = 2 * int(batch * heads * queries * keys) * one.width
        if recomputed:
            pass
        elif decision.alive is None:
            one.pruned.add(0.0, macs, 0.0)
        else:
            shares = do("mean", stop(decision.alive), axis=-1)
            one.pruned.add(1 - do("mean", shares), macs, 1 - do("mean", shares**2))
        noise = partial(self._noise, run=run, recomputed=recomputed)
        decision.later = self._left(probabilities, one, decision, previous, noise)
        return probabilities

    def _left(
        self, probabilities: Any, one: _Attention, decision: _Decision, previous: _Decision | None,
        noise: Callable[[Any], Any],
    ) -> Any:  # fmt: skip
        """Return 0/1 of the tokens that later layers keep: (N, T)."""
        received = do("sum", tensors_of(probabilities).wide(probabilities), axis=-2)
        length = int(received.shape[-1])
        alive = do("ones_like", received[:, 0]) if decision.alive is None else decision.alive
        units = per_unit(alive, self._size)
        count = int(units.shape[-1])
        if decision.alive is not None and previous is not None:
            count = previous.count
        guarded = np.arange(units.shape[-1]) * self._size < self._protect
        first = tensors_of(received).cast(guarded[None].astype(np.float32), received)
        if self._learned:
            hard = self._predicted(probabilities, received, one, noise)
            left = units * (first + (1 - first) * hard)
        else:
            score = stop(per_unit(do("sum", received, axis=1), self._size)) * units
            decision.count = max(density_count(self._share, count), int(guarded.sum()))
            left = winners(score + 1e6 * first + units - 1, decision.count) * units
        return per_token(left, self._size, length)

    def _predicted(
        self, probabilities: Any, received: Any, one: _Attention, noise: Callable[[Any], Any]
    ) -> Any:
        """Return 0/1 of the units that the predictor keeps: (N, units)."""
        own = do("diagonal", tensors_of(probabilities).wide(probabilities), axis1=-2, axis2=-1)
        features = per_unit(do("concatenate", (received, own), axis=1), self._size)
        features = do("transpose", as_type_of(features, one.skim[0]), (0, 2, 1))
        weight, bias, last, offset = one.skim
        hidden = features @ weight + bias
        logits = (do("tanh", hidden) @ last + offset)[..., 0]
        return as_type_of(binary_gumbel(logits, noise(logits)), received)

    @amanda.differentiable
    def _hold(self, branch: Any, state: Any, one: _Sum) -> Any:
        """Add nothing to dropped tokens at a residual connection."""
        decision = self._present.of(one)
        decision.state = None
        stays = self._along(one.attention, branch)
        if stays is None:
            return None
        if one.is_normed:
            decision.state = state
            return None
        return branch * stays, state

    @amanda.differentiable
    def _restore(self, normed: Any, node: DataflowNode, one: _Sum) -> Any:
        """Restore the state that dropped tokens had before a residual connection and its normalisation."""
        decision = self._present.of(one)
        state, decision.state = decision.state, None
        stays = None if state is None else self._along(one.attention, normed)
        if stays is None:
            return None
        restored = normed * stays + state * (1 - stays)
        self._flow.made(node, [restored])
        return restored

    def _along(self, attention: _Attention, states: Any) -> Any:
        """Return 0/1 of the tokens that reached an attention, (N, T, 1) or (T, N, 1), as `states`.

        Returns None for all tokens, and for states of other sequences than those of the attention.
        """
        decision = self._present.of(attention)
        if decision.later is None:
            return None
        shape, own = tuple(states.shape[:2]), tuple(decision.later.shape)
        if decision.alive is None or shape not in (own, own[::-1]):
            decision.carries = shape in (own, own[::-1])
            return None
        alive = decision.alive if shape == own else do("transpose", decision.alive, (1, 0))
        return as_type_of(alive, states)[..., None]
