"""Operations that gradients pass as they are: they have no backward operations to put a pullback at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._gradients import is_differentiable

if TYPE_CHECKING:
    import tensorflow as tf

    from ._rewrite import Rewriter

_PASSING = {
    "Identity": (0,), "Snapshot": (0,), "EnsureShape": (0,), "BiasAdd": (0,), "Sub": (0,),
    "Add": (0, 1), "AddV2": (0, 1),
}  # fmt: skip
"""Positions of the inputs whose gradient is that of the output, unless there is an operation for it."""


class Passing:
    """The way of gradients from where they are computed to where they are read, past such operations."""

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._rewriting = rewriter.rewriting
        self._edges = rewriter.gradients
        self._crossed: set[tf.Operation] = set()

    def positions(self, op: tf.Operation) -> list[int]:
        """Positions of the inputs whose gradient is the incoming one itself."""
        positions = _PASSING.get(op.type, ())
        computed = self._edges.of_inputs(op) if positions and op in self._edges.groups else {}
        return [i for i in positions if i not in computed and is_differentiable(op.inputs[i])]

    def follow(self, op: tf.Operation, value: Any, gradient: Any, ref: str, vanilla: str) -> None:
        """Make those read `ref` that read a gradient as that of a forward value, past what it passes.

        op: the backward operation that is being edited.  vanilla: what they read so far.
        """
        maker = value.op
        if ref != vanilla:
            self._redirect_readers(maker, gradient, ref)
        positions = self.positions(maker)
        if not positions or maker in self._edges.groups:
            return  # it goes on where the last of its own backward operations is
        self._crossed.add(maker)
        known = self._rewriter.known(maker)
        if known is None:
            return
        refs = self._rewriter.pullbacks.past(op, known[0], gradient, ref, positions)
        for i in positions:
            self.follow(op, maker.inputs[i], gradient, refs.get(i, ref), vanilla)

    def _redirect_readers(self, maker: tf.Operation, gradient: Any, ref: str) -> None:
        ends = maker not in self._edges.groups and not self.positions(maker)
        for reader, i in self._edges.readers(gradient):
            own = self._rewriter.forward.get(reader)
            if own is maker or (ends and (own is None or reader.type == "AddN")):
                self._rewriter.redirect(reader, i, ref)
        if ends:
            self._rewriter.returned[self._rewriter.edge(gradient)] = ref

    def tell_missed(self, backward: bool) -> None:
        """Report routines at operations that gradients pass unseen.

        backward: whether the gradients come from another graph.
        """
        groups = self._edges.groups
        candidates = [one for op in groups for output in op.outputs for one in output.consumers()]
        for op in dict.fromkeys(candidates):
            if op.type not in _PASSING or op in self._crossed or op in groups:
                continue
            known = self._rewriter.known(op)
            read_on = any(one in groups for output in op.outputs for one in output.consumers())
            if known is not None and known[0] in self._rewriting.taped and (read_on or backward):
                self._rewriting.report(
                    f"the gradient of the routines at {op.name}",
                    f"{op.type} passes gradients as they are, and has no backward op where it could go",
                )

    def tell_guessed(self, ops: Sequence[tf.Operation]) -> None:
        """Report routines at such operations of a body where names tell which gradients are theirs."""
        for op in ops:
            known = (
                self._rewriter.known(op) if op.type in _PASSING and op not in self._rewriter.forward else None
            )
            if known is not None and known[0] in self._rewriting.taped:
                self._rewriting.report(
                    f"the gradient of the routines at {op.name}",
                    f"{op.type} passes gradients as they are; whose these are only names tell, which may err",
                )
