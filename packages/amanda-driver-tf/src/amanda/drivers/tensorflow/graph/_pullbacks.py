"""Gradients through routines that take part in autodiff, in the backward operations of their op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._gradients import is_differentiable, key
from ._side import enum
from ._slots import Pullback

if TYPE_CHECKING:
    import tensorflow as tf

    from ._body import Taped
    from ._rewrite import Rewriter


class Pullbacks:
    """Pullbacks inserted into one body.

    entered: for each forward operation, by position of an output, its gradient and how that is read.
    """

    def __init__(self, rewriter: Rewriter) -> None:
        self._rewriter = rewriter
        self._rewriting = rewriter.rewriting
        self._insertions = rewriter.insertions
        self._edges = rewriter.gradients
        self._entered: dict[tf.Operation, dict[int, tuple[Any, str]]] = {}
        self._entered_by_id: dict[int, dict[int, tuple[Any, str]]] = {}
        self._pulled: dict[Any, str] = {}

    def at_outputs(self, op: tf.Operation, forward: tf.Operation, forward_id: int) -> None:
        """Make a backward operation read gradients of its forward one's outputs behind pullbacks."""
        taped, read = self._rewriting.taped.get(forward_id), self._rewriter.read_at
        self._entered_by_id[forward_id] = self._entered.setdefault(forward, {})
        for i in self._edges.from_outside(op) if self._rewriting.taped else ():
            tensor = op.inputs[i]
            position = self._output_of(forward, tensor)
            if position is None:
                continue
            ref = self._pulled.get((forward, key(tensor)))
            if ref is None:
                ref = read(op, i)
                for one in reversed([one for one in taped or () if one.side == "after"]):
                    pulled = self._pull(op, one, {position: (tensor, ref)}, {position: tensor})
                    ref = pulled.get(position, ref)
                self._pulled[forward, key(tensor)] = ref
            self._entered.setdefault(forward, {})[position] = (tensor, ref)
            if ref != read(op, i):
                self._rewriter.redirect(op, i, ref)

    def at_inputs(
        self, op: tf.Operation, forward: tf.Operation, forward_id: int, passed: Sequence[int] = ()
    ) -> dict[int, tuple[Any, str]]:
        """After the last backward operation: by position, gradients of the inputs and how they are read.

        passed: positions of the inputs whose gradient is that of the output.
        """
        taped = self._rewriting.taped.get(forward_id, [])
        before = [one for one in taped if one.side == "before"]
        instead = [one for one in taped if one.side == "instead"]
        gradients = self._edges.of_inputs(forward) if self._rewriting.taped else {}
        refs = {i: (tensor, self._rewriter.read_tensor(tensor)) for i, tensor in gradients.items()}
        entered = self._entered.get(forward, {})
        if passed and 0 in entered:
            refs |= dict.fromkeys(passed, entered[0])
            gradients = {i: tensor for i, (tensor, _) in refs.items()}
        for one in instead:
            pulled = self._pull(op, one, self._entered.get(forward, {}), gradients)
            refs = {i: (gradients[i], ref) for i, ref in pulled.items()}
        for one in (one for one in taped if one.side == "past"):
            pulled = self._pull(op, one, self._entered_by_id.get(one.maker or 0, {}), gradients)
            refs |= {i: (gradients[i], ref) for i, ref in pulled.items()}
        for one in reversed(before):
            pulled = self._pull(op, one, refs, gradients)
            refs |= {i: (gradients[i], ref) for i, ref in pulled.items()}
        return refs

    def past(
        self, op: tf.Operation, forward_id: int, gradient: Any, ref: str, positions: Sequence[int]
    ) -> dict[int, str]:
        """By position of an input, its gradient where an operation passes that of its output as it is."""
        taped = self._rewriting.taped.get(forward_id, [])
        for one in reversed([one for one in taped if one.side == "after"]):
            ref = self._pull(op, one, {0: (gradient, ref)}, {0: gradient}).get(0, ref)
        wanted = dict.fromkeys(positions, gradient)
        refs = dict.fromkeys(positions, ref)
        for one in reversed([one for one in taped if one.side in ("before", "instead", "past")]):
            given = {i: (gradient, ref) for i, ref in refs.items()}
            if one.side != "before":
                given = {0: (gradient, ref)} if one.maker is None else self._entered_by_id.get(one.maker, {})
            refs |= self._pull(op, one, given, wanted)
        return refs

    def _pull(
        self, op: tf.Operation, taped: Taped, entering: dict[int, tuple[Any, str]], wanted: dict[int, Any]
    ) -> dict[int, str]:
        """Gradients of what a place was given, by position; from those of what it gave."""
        outputs = [(k, *entering[i]) for k, i in enumerate(taped.gave) if i in entering]
        inputs = [(k, i) for k, i in enumerate(taped.given) if i in wanted]
        if not outputs or not inputs:
            return {}
        depth = self._rewriting.depths.get(taped.place[0], 0)
        pullback = Pullback(taped.place, [k for k, *_ in outputs], [k for k, _ in inputs], depth)
        identity, made = taped.node
        here = identity == self._insertions.body.identity
        order = self._insertions.waits
        waits = order.after([made], self._rewriter.body.number_at(op, True)) if here else []
        readers = self._rewriting.readers[taped.place]
        readers.count += 1
        if not here or depth or self._insertions.body.node_name(op) in order.in_flow:
            readers.told = False
        name = self._insertions.add(
            op, pullback, [ref for *_, ref in outputs], [enum(tensor) for _, tensor, _ in outputs],
            [enum(wanted[i]) for _, i in inputs], ahead=True, instead=True, waits=waits,
        )  # fmt: skip
        return {i: self._insertions.output_of(name, k) for k, (_, i) in enumerate(inputs)}

    def _output_of(self, forward: tf.Operation, gradient: Any) -> int | None:
        """Position of the output that a gradient is of."""
        entered = self._entered.get(forward, {})
        outputs: Sequence[Any] = forward.outputs
        for i, output in enumerate(outputs):
            known = entered.get(i)
            if known is not None and key(known[0]) == key(gradient):
                return i
            if (
                known is None
                and is_differentiable(output)
                and (len(outputs) == 1 or gradient.shape.is_compatible_with(output.shape))
            ):
                return i
        return None
