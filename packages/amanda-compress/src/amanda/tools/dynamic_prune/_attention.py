"""Token skimming: attention chooses tokens, or blocks of tokens, that later layers drop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import amanda
from amanda.options import NonNegativeFloat, NonNegativeInt, PositiveInt, PositiveShare, Range, Seed, checked
from amanda.tools.dataflow import DataflowNode
from amanda.tools.dynamic_prune._base import (
    LAYERS,
    DynamicPruneResult,
    DynamicPruneTool,
    PrunedOp,
    Residual,
    Run,
    find_scores,
    head_count,
    is_of_one_sequence,
    residual_at,
    without_run,
)
from amanda.tools.dynamic_prune._math import (
    as_type_of,
    binary_gumbel,
    density_count,
    detached,
    per_token,
    per_unit,
    renormalised,
    top_mask,
)
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import backend_of

if TYPE_CHECKING:
    from torch import Tensor


def attention_with_pruned_probabilities(
    prune: Callable[..., Tensor],
    runs_unpruned: Callable[[Tensor], bool],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    run: dict[Any, Any] | None,
    recomputed: bool,
) -> Any:
    """Stand in for PyTorch's `scaled_dot_product_attention`: `prune` changes the probabilities.

    runs_unpruned: returns True for queries whose attention runs as it is.
    run, recomputed: arguments of the routine, which are passed on to `prune`.
    Returns NotImplemented, which runs the original, there and where queries are not as many as keys.
    """
    import torch
    from torch.nn import functional

    # NotImplemented runs the original: generation with a cache has one query, whose tokens cannot be matched
    # with keys.
    if runs_unpruned(query) or query.shape[-2] != key.shape[-2] or query.dim() not in (3, 4):
        return NotImplemented
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        causal_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal_mask, float("-inf"))
    if attn_mask is not None:
        is_boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_boolean else scores + attn_mask
    # Rows that a mask hides completely: PyTorch's function returns 0 there, and a softmax NaN.
    is_hidden = scores.isneginf().all(-1, keepdim=True)
    # Taken apart because no fused kernel returns probabilities.
    probabilities = scores.softmax(-1).masked_fill(is_hidden, 0.0)
    return functional.dropout(prune(probabilities, run=run, recomputed=recomputed), dropout_p) @ value


ATTENTIONS = {"torch": attention_with_pruned_probabilities}
"""Functions for attention with pruned probabilities, by the library of the tensors."""


_PASSING = frozenset({"dropout", "to", "Identity", "clone", "contiguous"})
_FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")


@dataclass(eq=False)
class _Attention:
    """An attention whose tokens may be dropped.

    heads: number of heads if batch and heads share an axis in the softmax, else None.  width: of a head.
    previous: the attention before this one.  skim: parameters of the learned predictor.
    """

    pruned: PrunedOp
    node: DataflowNode
    heads: int | None
    width: int
    previous: _Attention | None
    skim: tuple[Any, ...]


@dataclass(eq=False)
class _TokenMasks:
    """The decision of an attention for the last input.

    alive: 0/1, (N, T), of the tokens that reach the attention; None for all.  later_tokens: of those that it
    keeps for later layers; None before it has run.  count: number of units kept, if the same for each input.
    has_same_later_sequences: True if later layers have the sequences of the attention, as far as residual
    connections show; windows of images differ by layer.
    state: at a residual connection, the tensor that the branch is added to.
    """

    alive: Any = None
    later_tokens: Any = None
    count: int = 0
    has_same_later_sequences: bool = True
    state: Any = None


@dataclass(eq=False)
class _ResidualSum:
    """A residual connection behind an attention.

    is_normed: True if the branch is added to the output of a normalisation; then the normalisation that
    follows restores the state of dropped tokens.
    """

    attention: _Attention
    is_normed: bool


class AttentionPruneTool(DynamicPruneTool):
    """Drop tokens from later layers, by the attention that the tokens receive.

    A dropped token is neither key nor query of later attentions, and residual connections keep its state.
    In training learned decisions are sampled (Gumbel, straight through).

    Sources: Guan et al. 2022, "Block-skim" and "Transkimmer"; Goyal et al. 2020, "PoWER-BERT", for the score.

    Args:
        unit: "token", or "block" of `block` adjacent tokens.
        by: "attention": each attention keeps the share `keep` of its tokens that all heads and queries
            together attend to most; "learned": a predictor of two layers chooses, from the attention that a
            token receives and pays to itself in each head; then `keep` is the target of `loss()`, the mean
            share of tokens in all attentions.
        keep: Share of the tokens that each attention keeps.
        block: Adjacent tokens of a block, for unit "block".
        protect: Number of first tokens that are always kept.
        strength: Factor of the loss.
        hidden: Neurons of the predictor.
        seed: Seed of the predictors' initial values, and of the noise in training.
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
        super().__init__(seed, _TokenMasks)
        self._unit_size, self._protect, self._hidden = block if unit == "block" else 1, protect, hidden
        self._keep_share, self._strength, self._is_learned = keep, strength, by == "learned"
        self._fused_types: set[str] = set()

    @property
    def result(self) -> DynamicPruneResult:
        """Return the result so far; MACs are those of the products of queries, keys and values."""
        notes = [
            f"{kind} is one fused op: the attention in it was not pruned."
            for kind in sorted(self._fused_types)
        ]
        return DynamicPruneResult(self._rows.values(), [*notes, *self._notes()])

    def loss(self) -> Any:
        """Return strength times the squared distance from `keep` of the mean share of attentions' tokens.

        0.0 unless thresholds are learned and an attention has decided which tokens stay.
        """
        decisions = [decision for decision in self._predictions() if decision.later_tokens is not None]
        if not decisions or not self._is_learned:
            return 0.0
        share = sum(
            # None: the attention has dropped no token.
            1.0 if decision.alive is None else do("mean", decision.alive)
            for decision in decisions
        ) / len(decisions)
        return self._strength * (share - self._keep_share) ** 2

    def _analyse(self, context: amanda.OpContext, node: DataflowNode) -> None:
        """Insert the pruning of an attention, of a residual connection behind, or of its normalisation.

        Fused ops, in which nothing can be pruned, are noted for the result.
        """
        kind = context["type"]
        if kind in _FUSED:
            self._fused_types.add(kind)
        elif kind == "scaled_dot_product_attention" and is_of_one_sequence(self._flow, node):
            attend = ATTENTIONS.get(backend_of(context.get_inputs()[0]))
            if attend is None:
                self._fused_types.add(kind)
                return
            attention = self._attention_record(context, node, node)
            prune = partial(self._prune_probabilities, attention=attention)
            runs_unpruned = partial(self._forget_if_transformed, attention)
            context.replace_op(partial(attend, prune, runs_unpruned), **without_run(context))
        elif kind == "softmax" and (product := find_scores(self._flow, node)) is not None:
            if not is_of_one_sequence(self._flow, product):
                return
            attention = self._attention_record(context, node, product)
            context.insert_after_op(
                self._prune_softmax, outputs=[0], attention=attention, **without_run(context)
            )
        elif (connection := residual_at(self._flow, node)) is not None:
            self._analyse_residual(context, node, connection)
        elif kind == "layer_norm":
            residual_sum = self._flow.maker(node.inputs[0])
            if residual_sum is not None and "sum" in residual_sum.notes:
                context.insert_after_op(
                    self._restore_dropped_tokens, outputs=[0], node=node, residual=residual_sum.notes["sum"]
                )

    def _attention_record(
        self, context: amanda.OpContext, node: DataflowNode, product: DataflowNode
    ) -> _Attention:
        """Return the record of an attention, and note it at the node of its softmax.

        node: of the softmax.  product: of queries and keys; of a fused attention both are its one node.
        """
        scores_shape, query_shape = node.shapes[0] or (), product.shapes[0] or ()
        # Scores of 3 axes have batch and heads in one; a fused attention is its own product, without scores.
        has_heads_in_batch = node is not product and len(scores_shape) == 3
        heads = head_count(self._flow, product, scores_shape) if has_heads_in_batch else None
        extent_of_heads = scores_shape[1] if len(scores_shape) == 4 else None
        width = query_shape[-1] or 0 if query_shape else 0
        unit = "tokens" if self._unit_size == 1 else f"blocks of {self._unit_size}"
        attention = self._op_record(context, lambda: _Attention(
            self._add_row(context, unit), node, heads, width, self._flow.nearest(node.reads, "attention"),
            self._skim_parameters(context, heads or extent_of_heads or 1) if self._is_learned else (),
        ))  # fmt: skip
        node.notes["attention"] = attention
        attention.node = node
        return attention

    def _skim_parameters(self, context: amanda.OpContext, heads: int) -> tuple[Any, ...]:
        """Return the predictor's parameters; the initial bias keeps all tokens."""
        hidden, normal = self._hidden, self._initial_random.normal
        width = 2 * heads  # features: the attention that a token receives, and pays to itself, in each head
        makers = {
            "skim.hidden.weight": lambda: normal(0, width**-0.5, (width, hidden)),
            "skim.hidden.bias": lambda: np.zeros(hidden),
            "skim.weight": lambda: normal(0, 0.1 * hidden**-0.5, (hidden, 1)),
            "skim.bias": lambda: np.ones(1),
        }
        like = context.get_inputs()[0]
        return tuple(self._keep_parameter(context, like, name, make) for name, make in makers.items())

    def _analyse_residual(self, context: amanda.OpContext, node: DataflowNode, connection: Residual) -> None:
        """Keep the state of dropped tokens at a residual connection whose branch follows an attention.

        Another branch, and one without a layer, stay unchanged.
        """
        attention = self._flow.nearest([node.inputs[connection.branch]], "attention")
        products = [op for op in connection.ops if op.type in LAYERS]
        if attention is None or not products:
            return
        # Post-norm models (BERT) add to a normalised state, pre-norm models to a plain one; what a dropped
        # token keeps differs.
        types = (op.type for _, op in self._flow.back(connection.shortcut) if op is not None)
        is_normed = next((type for type in types if type not in _PASSING), None) == "layer_norm"
        residual = node.notes["sum"] = _ResidualSum(attention, is_normed)
        context.insert_before_op(
            self._hold_dropped_tokens, inputs=[connection.branch, 1 - connection.branch], residual=residual
        )

    @amanda.differentiable
    def _prune_softmax(self, probabilities: Any, attention: _Attention, run: Run, recomputed: bool) -> Any:
        """Return the output of a softmax without dropped tokens, and record it in the dataflow."""
        pruned = self._prune_probabilities(probabilities, attention, run, recomputed)
        # The dataflow knows tensors by identity, and later ops read this one.
        self._flow.made(attention.node, [pruned])
        return pruned

    def _prune_probabilities(
        self, probabilities: Any, attention: _Attention, run: Run, recomputed: bool
    ) -> Any:
        """Return probabilities without dropped tokens, and choose the tokens to drop next.

        Attention to another sequence, to a cache, or within a transform stays unchanged.  Adds the execution
        to the result unless it is `recomputed`.

        probabilities: (N, H, T, T), or (N * H, T, T).
        """
        if self._forget_if_transformed(attention, probabilities):
            return probabilities
        if len(probabilities.shape) == 3:
            shape, heads = tuple(probabilities.shape), attention.heads or 1
            by_head = do("reshape", probabilities, (shape[0] // heads, heads, *shape[1:]))
            return do("reshape", self._prune_probabilities(by_head, attention, run, recomputed), shape)
        batch, heads, queries, keys = probabilities.shape
        decision = self._states.state_of(attention)
        decision.alive = decision.later_tokens = None
        # Attention to another sequence, or to a cache: its keys are not tokens of later layers.
        if queries != keys:
            return probabilities
        previous = None if attention.previous is None else self._states.state_of(attention.previous)
        alive_tokens = None
        if previous is not None and previous.has_same_later_sequences:
            alive_tokens = previous.later_tokens
        if alive_tokens is not None and tuple(alive_tokens.shape) == (batch, keys):
            decision.alive = alive_tokens
            # Without `detached`, a key that took most attention would get an unbounded gradient.
            alive = as_type_of(detached(alive_tokens), probabilities)
            probabilities = renormalised(probabilities, alive[:, None, None]) * alive[:, None, :, None]
        if not recomputed:  # a recomputation was counted in the first execution already
            macs = 2 * int(batch * heads * queries * keys) * attention.width
            if decision.alive is None:
                attention.pruned.add(0.0, macs, 0.0)
            else:
                shares = do("mean", detached(decision.alive), axis=-1)
                # A product of two tokens is needed if both are alive.
                attention.pruned.add(1 - do("mean", shares), macs, 1 - do("mean", shares**2))
        noise = partial(self._draw_noise, run=run, recomputed=recomputed)
        decision.later_tokens = self._choose_tokens(probabilities, attention, decision, previous, noise)
        return probabilities

    def _forget_if_transformed(self, attention: _Attention, value: Any) -> bool:
        """Return True within a transform, and forget the decision: all tokens reach the layers behind."""
        if not self._is_transformed(value, attention.pruned):
            return False
        decision = self._states.state_of(attention)
        decision.alive = decision.later_tokens = None
        return True

    def _choose_tokens(
        self, probabilities: Any, attention: _Attention, decision: _TokenMasks, previous: _TokenMasks | None,
        noise: Callable[[Any], Any],
    ) -> Any:  # fmt: skip
        """Return 0/1 of the tokens that later layers keep: (N, T).

        A unit, a token or a block, is kept as a whole.  Unless the choice is learned, sets `decision.count`.
        """
        # The attention that each token receives by each head, (N, H, T), from all queries.
        # In float32: sums over thousands of queries exceed the precision of half types.
        received = do("sum", tensors_of(probabilities).wide(probabilities), axis=-2)
        length = int(received.shape[-1])
        alive_tokens = do("ones_like", received[:, 0]) if decision.alive is None else decision.alive
        alive_units = per_unit(alive_tokens, self._unit_size)
        alive_count = int(alive_units.shape[-1])
        if decision.alive is not None and previous is not None:
            alive_count = previous.count
        protected_units = np.arange(alive_units.shape[-1]) * self._unit_size < self._protect
        is_protected = tensors_of(received).cast(protected_units[None].astype(np.float32), received)
        if self._is_learned:
            predicted_units = self._predict_units(probabilities, received, attention, noise)
            keep_mask = alive_units * (is_protected + (1 - is_protected) * predicted_units)
        else:
            score = detached(per_unit(do("sum", received, axis=1), self._unit_size)) * alive_units
            decision.count = max(density_count(self._keep_share, alive_count), int(protected_units.sum()))
            # Protected units rank first, dropped ones last: scores are at most heads times tokens, far below
            # a million.
            rank_score = score + 1e6 * is_protected + alive_units - 1
            keep_mask = top_mask(rank_score, decision.count) * alive_units
        return per_token(keep_mask, self._unit_size, length)

    def _predict_units(
        self, probabilities: Any, received: Any, attention: _Attention, noise: Callable[[Any], Any]
    ) -> Any:
        """Return 0/1 of the units that the predictor keeps: (N, units)."""
        self_attention = do("diagonal", tensors_of(probabilities).wide(probabilities), axis1=-2, axis2=-1)
        features = per_unit(do("concatenate", (received, self_attention), axis=1), self._unit_size)
        features = do("transpose", as_type_of(features, attention.skim[0]), (0, 2, 1))
        weight, bias, output_weight, output_bias = attention.skim
        hidden = features @ weight + bias
        logits = (do("tanh", hidden) @ output_weight + output_bias)[..., 0]
        return as_type_of(binary_gumbel(logits, noise(logits)), received)

    @amanda.differentiable
    def _hold_dropped_tokens(self, branch: Any, state: Any, residual: _ResidualSum) -> Any:
        """Add nothing to dropped tokens at a residual connection; keep the state for a normalisation behind.

        Returns None, for no change, without dropped tokens, and where a normalisation follows.
        """
        decision = self._states.state_of(residual)
        decision.state = None
        if self._is_transformed(branch, residual.attention.pruned):
            return None
        alive = self._tokens_alive(residual.attention, branch)
        if alive is None:
            return None
        # The normalisation behind would change a dropped token even if nothing was added, so that its state
        # is restored there.
        if residual.is_normed:
            decision.state = state
            return None
        return branch * alive, state

    @amanda.differentiable
    def _restore_dropped_tokens(self, normed: Any, node: DataflowNode, residual: _ResidualSum) -> Any:
        """Restore the state that dropped tokens had before a residual connection and its normalisation.

        Returns None, for no change, without a held state; releases the state.
        """
        decision = self._states.state_of(residual)
        # Released at once: the tensor is as large as the activations.
        state, decision.state = decision.state, None
        alive = None if state is None else self._tokens_alive(residual.attention, normed)
        if alive is None:
            return None
        restored = normed * alive + state * (1 - alive)
        self._flow.made(node, [restored])
        return restored

    def _tokens_alive(self, attention: _Attention, states: Any) -> Any:
        """Return 0/1 of the tokens that reached an attention, (N, T, 1) or (T, N, 1), as `states`.

        Returns None for all tokens, and for states of other sequences than those of the attention.  Sets its
        `has_same_later_sequences` by the states behind the first attention.
        """
        decision = self._states.state_of(attention)
        if decision.later_tokens is None:
            return None
        shape, batch_and_tokens = tuple(states.shape[:2]), tuple(decision.later_tokens.shape)
        has_same_sequences = shape in (batch_and_tokens, batch_and_tokens[::-1])
        if decision.alive is None or not has_same_sequences:
            decision.has_same_later_sequences = has_same_sequences
            return None
        alive = decision.alive if shape == batch_and_tokens else do("transpose", decision.alive, (1, 0))
        return as_type_of(alive, states)[..., None]
