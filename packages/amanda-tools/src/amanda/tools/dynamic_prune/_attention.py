"""Token skimming: attention decides which tokens, or blocks of them, later layers do without."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from autoray import do

import amanda
from amanda.errors import AmandaError
from amanda.tools.dynamic_prune._base import DynamicPruneTool, checked_share
from amanda.tools.dynamic_prune._patterns import (
    LAYERS,
    PRODUCTS,
    Residual,
    head_count,
    is_of_one_sequence,
    residual,
    scores_of,
)
from amanda.tools.dynamic_prune._pytorch import attend
from amanda.tools.dynamic_prune._result import DynamicPruneResult
from amanda.tools.dynamic_prune._skimming import Attention, Decision, Skimming
from amanda.tools.kit import DataflowNode, check_one_of
from amanda.tools.mapping import backend_of

_PASSING = frozenset({"dropout", "to", "Identity", "clone", "contiguous"})
_FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")


@dataclass(eq=False)
class _Sum:
    """A residual connection behind an attention.

    is_normed: whether it adds to what a normalisation gave; then one follows, which takes dropped tokens
    back to the state that was added to.
    """

    attention: Attention
    is_normed: bool


class AttentionPruneTool(DynamicPruneTool):
    """Drops tokens from later layers by what attention says of them.

    unit: "token", or "block" of `block` tokens in a row.  by: "attention": each attention keeps, of the
    tokens that it was given, the share `keep` that all heads and queries attend to most; "learned": a
    predictor of two layers, from the attention that a token receives and pays to itself in each head, says
    what is kept; then `keep` is the mean share of tokens in all attentions that `loss()` aims at.
    protect: so many first tokens stay.  strength: of the loss.  hidden: neurons of the predictor.

    A dropped token is no key and no query of later attentions, and residual connections leave its state as
    it was. In training learned decisions are sampled (Gumbel, straight through).
    Sources: Guan et al. 2022, "Block-skim" and "Transkimmer"; Goyal et al. 2020, "PoWER-BERT", for the score.
    """

    def __init__(
        self,
        unit: Literal["token", "block"] = "token",
        by: Literal["attention", "learned"] = "attention",
        keep: float = 0.7,
        block: int = 4,
        protect: int = 1,
        strength: float = 1.0,
        hidden: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__(seed, Decision)
        check_one_of("unit", unit, ("token", "block"), AmandaError)
        check_one_of("by", by, ("attention", "learned"), AmandaError)
        for name, count, least, of in (
            ("block", block, 1, "tokens"), ("protect", protect, 0, "tokens"), ("hidden", hidden, 1, "neurons")
        ):  # fmt: skip
            if not isinstance(count, (int, np.integer)) or count < least:
                raise AmandaError(f"{name} is {count!r}; it is a number of {of}, {least} at least")
        size, share = block if unit == "block" else 1, checked_share("keep", keep)
        self._skimming = Skimming(size, protect, share, by == "learned", self._noise, self._present)
        self._strength, self._hidden = strength, hidden
        self._fused: set[str] = set()

    @property
    def result(self) -> DynamicPruneResult:
        """The tokens that were pruned so far; MACs are those of the products of queries, keys and values."""
        notes = [f"{name} is one op: what attends in it was left as it is." for name in sorted(self._fused)]
        return DynamicPruneResult(self._pruned(), notes)

    def loss(self) -> Any:
        """Return strength times the squared distance from `keep` of the mean share of attentions' tokens."""
        ran = [said for said in self._said(self._ops.values()) if said.later is not None]
        if not ran or not self._skimming.learned:
            return 0.0
        share = sum(1.0 if said.alive is None else do("mean", said.alive) for said in ran) / len(ran)
        return self._strength * (share - self._skimming.keep) ** 2

    def _analyse(self, context: amanda.OpContext, node: DataflowNode) -> None:
        kind = context["type"]
        if kind in _FUSED:
            self._fused.add(kind)
        elif kind == "scaled_dot_product_attention" and is_of_one_sequence(self._flow, node):
            if backend_of(context.get_inputs()[0]) != "torch":
                self._fused.add(kind)
                return
            one = self._attention(context, node, node)
            context.replace_op(partial(attend, partial(self._skimming.attend, one=one)))
        elif kind == "softmax" and (product := scores_of(self._flow, node)) is not None:
            if not is_of_one_sequence(self._flow, product):
                return
            one = self._attention(context, node, product)
            context.insert_after_op(self._prune, outputs=[0], one=one)
        elif (found := residual(self._flow, node)) is not None:
            self._look_at_sum(context, node, found)
        elif kind == "layer_norm":
            added = self._flow.maker(node.inputs[0])
            if added is not None and "sum" in added.notes:
                context.insert_after_op(self._restore, outputs=[0], node=node, one=added.notes["sum"])

    def _attention(self, context: amanda.OpContext, node: DataflowNode, product: DataflowNode) -> Attention:
        scores, given = node.shapes[0] or (), product.shapes[0] or ()
        heads = head_count(self._flow, product, scores) if node is not product and len(scores) == 3 else None
        count = heads or (scores[1] if len(scores) == 4 else 1) or 1
        size, learned = self._skimming.size, self._skimming.learned
        one = self._known(self._ops, context, lambda: Attention(
            self._row(context, "tokens" if size == 1 else f"blocks of {size}"), node, heads,
            given[-1] or 0 if given else 0, self._flow.nearest(node.reads, "attention"),
            self._skim(context, count) if learned else (),
        ))  # fmt: skip
        node.notes["attention"] = one
        one.node = node
        return one

    def _skim(self, context: amanda.OpContext, heads: int) -> tuple[Any, ...]:
        """Return the predictor's parameters, of which the last lets all tokens be kept at first."""
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
        products = [one for one in found.ops if one.type in PRODUCTS | LAYERS]
        if attention is None or not products:
            return
        made_by = (one.type for _, one in self._flow.back(found.identity) if one is not None)
        is_normed = next((one for one in made_by if one not in _PASSING), None) == "layer_norm"
        one = node.notes["sum"] = _Sum(attention, is_normed)
        context.insert_before_op(self._hold, inputs=[found.branch, 1 - found.branch], one=one)

    @amanda.differentiable
    def _prune(self, probabilities: Any, one: Attention) -> Any:
        pruned = self._skimming.attend(probabilities, one)
        self._flow.made(one.node, [pruned])
        return pruned

    @amanda.differentiable
    def _hold(self, branch: Any, state: Any, one: _Sum) -> Any:
        """Add nothing to dropped tokens at a residual connection."""
        said = self._present.of(one)
        said.state = None
        stays = self._skimming.along(one.attention, branch)
        if stays is None:
            return None
        if one.is_normed:
            said.state = state
            return None
        return branch * stays, state

    @amanda.differentiable
    def _restore(self, normed: Any, node: DataflowNode, one: _Sum) -> Any:
        """Take dropped tokens back to what they were before a residual connection and its normalisation."""
        said = self._present.of(one)
        state, said.state = said.state, None
        stays = None if state is None else self._skimming.along(one.attention, normed)
        if stays is None:
            return None
        restored = normed * stays + state * (1 - stays)
        self._flow.made(node, [restored])
        return restored
