"""Routines at the operations of a body: which go together, which are traced, what each is given."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf
from amanda.backend import Action, Insertion, NotTraceable, OpFacts, Rewriter, Side, Value

from ._body import Body, Rewriting, Taped
from ._insertions import Insertions, decides
from ._side import OpSide, at, enum, is_plain
from ._slots import Node
from ._traced import Traced


class ReadElsewhere(NamedTuple):
    """An input of another operation that a replacement reads: its value, op id and flat position."""

    value: Value
    op_id: int
    position: int


class Routines(Rewriter[tf.Operation]):
    """The part of a rewriter that puts routines among the nodes of one body.

    removed: by the name of a replaced operation's node, the node that runs instead.
    """

    insertion = Node
    rewriting: Rewriting

    def __init__(self, body: Body, rewriting: Rewriting) -> None:
        super().__init__(rewriting)
        self.body = body
        self.insertions = Insertions(body, rewriting)
        self.removed: dict[str, str] = {}
        self._places: dict[int, int] = {}

    def nodes(self) -> Iterable[tf.Operation]:
        """The operations, in order."""
        return self.body.ops

    def keep(self, node: tf.Operation, inputs: Side, outputs: Side) -> None:
        """Leave a node where it is: it is edited when all routines have been put there."""

    def can_give(self, symbol: Any) -> bool:
        """Return True for a tensor that is no handle and no reference."""
        return is_plain(symbol)

    def group(self, action: Action) -> Hashable:
        """Group of a routine: what is traced together becomes one function."""
        # Written into a file each tool's are a function of their own, so that it is told which fails.
        tool = id(action.tool) if self.rewriting.written else 0
        restless = self.rewriting.volatile_name(action) if action.traceable else ""
        return action.observer, self._takes_part(action), action.traceable, restless, tool

    def _takes_part(self, action: Action) -> bool:
        """Return True if a routine takes part in autodiff."""
        return action.differentiable or self.rewriting.state.autodiff

    def insert_all(self, actions: Sequence[Action], side: Side, facts: OpFacts) -> None:
        """Put routines at a side; at a backward op that no gradient enters there is nothing to see."""
        if side.count or facts.backward_op is None:
            super().insert_all(actions, side, facts)
        elif actions and at(side).op.inputs:  # else it is a constant
            where, what = ("before", "enters") if at(side).ahead else ("after", "leaves")
            self.rewriting.report(
                f"routines {where} backward ops that no gradient {what}",
                "in a graph such routines get gradients; ops that compute shapes, among others, have none",
            )

    def replace(self, action: Action, inputs: Side, outputs: Side, facts: OpFacts) -> bool:
        """Put a routine in the place of an operation, or of the gradients that leave a backward one."""
        every = range(outputs.count)
        if facts.backward_op is not None:
            gives = outputs.where(every, is_plain)
            return bool(every) and self.insert([action], inputs, range(inputs.count), outputs, gives, facts)
        op = at(inputs).op
        if action.reads and self.body.guessed:
            self.rewriting.report(
                f"the replacement of {op.name}",
                "it reads inputs of other ops, and only names tell which gradients are theirs: let the "
                "function be traced, or the graph be made, within a scope",
            )
            return False
        reads = self.reads(action, at(inputs), facts)
        if outputs.where(every, is_plain) != list(every):
            self.rewriting.report(f"the replacement of {op.name}", f"what {op.type} gives is no value")
            return False
        given = inputs.selected([action.select if action.reads else None])
        if not self.insert([action], inputs, given, outputs, every, facts, [one.value for one in reads]):
            return False
        self.removed[self.body.node_name(op)] = self.insertions.made[-1].name
        if reads and self.rewriting.differentiated:
            self._lead_past(facts, reads)
        return True

    @abstractmethod
    def reads(self, action: Action, inputs: OpSide, facts: OpFacts) -> Sequence[ReadElsewhere]:
        """Return what a replacement reads of other operations."""

    def formed(self, place: Insertion, wanted: Sequence[Any], given_of: Side, gives_to: Side) -> Insertion:
        """Give routines the types that the graph has there, and a name for what they keep."""
        assert isinstance(place, Node)
        facts, action = place.facts, place.actions[0]
        place.depth = self.rewriting.depths.get(facts.op_id, 0)
        place.dtypes = [one.dtype.base_dtype for one in wanted]
        if facts.backward_op is not None:
            place.read_gradients = place.output_positions if place.replaces else ()
        elif not action.observer and self.rewriting.differentiated:
            self._keep_for_gradients(place, at(given_of), gives_to)
        return place

    def _keep_for_gradients(self, place: Node, side: OpSide, gives_to: Side) -> None:
        """Make routines keep their values, where the gradients of their op need these."""
        facts = place.facts
        takes_part = place.replaces or self._takes_part(place.actions[0])
        alone = not self.body.apart and facts.op.name not in self.body.stacked
        if alone and not takes_part:
            return
        where = "instead" if place.replaces else "before" if side.ahead else "after"
        count = self._places[facts.op_id] = self._places.get(facts.op_id, 0) + 1
        place.keeps, place.taped = (facts.op_id, where, count), takes_part
        place.readers = self.rewriting.readers[place.keeps]
        place.readers.told = alone
        if takes_part:
            name = f"amanda/{len(self.rewriting.table)}"  # that of the node which is made next
            given = [*side.flat(place.input_positions), *[-1] * place.reads]
            taped = Taped(
                where, place.keeps, (self.body.identity, name), given, gives_to.flat(place.output_positions)
            )
            self.rewriting.taped.setdefault(facts.op_id, []).append(taped)

    def _lead_past(self, facts: OpFacts, reads: Sequence[ReadElsewhere]) -> None:
        """Lead gradients of what a replacement reads of other operations to these."""
        taped = self.rewriting.taped[facts.op_id][-1]
        own = [-1] * (len(taped.given) - len(reads))
        for reader in dict.fromkeys(one.op_id for one in reads):
            given = [one.position if one.op_id == reader else -1 for one in reads]
            past = replace(taped, side="past", given=own + given, maker=facts.op_id)
            self.rewriting.taped.setdefault(reader, []).append(past)

    def untraced(self, place: Insertion) -> str | None:
        """Return why routines are not traced, "" where that goes without saying; None where they are."""
        assert isinstance(place, Node)
        facts, written = place.facts, self.rewriting.written
        if place.replaces:
            return None if written else f"it replaces {getattr(facts.backward_op or facts.op, 'type', '')}"
        if place.keeps is not None:
            return "it takes part in autodiff" if place.taped else _KEPT
        if not place.dtypes:
            return "it is given nothing that it can change" if written else ""
        if not place.actions[0].traceable:
            return ""
        for action in place.actions:
            if action.takes_run:
                self._tell_called(action, "it takes `run`, which belongs to one execution")
        return "" if place.takes_run else None

    def report_python_call(self, place: Insertion, why: str) -> None:
        """Report that traceable routines run as Python, but for those that are meant to be as they are."""
        assert isinstance(place, Node)
        for action in place.actions:
            if place.replaces or place.keeps is None or not action.differentiable:
                self._tell_called(action, why)

    def _tell_called(self, action: Action, why: str) -> None:
        if action.traceable:
            self.rewriting.report(f"traceable {action}", f"{why}, so it runs as Python")

    def inline(
        self, place: Insertion, given: Sequence[Value], wanted: Sequence[Any], side: Side
    ) -> list[Value]:
        """Write the call of a function that is traced of the routines."""
        assert isinstance(place, Node)
        try:
            routine = Traced(place, [one.symbol for one in given], self.rewriting)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise NotTraceable(f"it cannot be traced: {reason}") from error
        self.rewriting.traced += [(action, routine.held) for action in place.actions]
        op, refs, gives = at(side).op, [one.ref for one in given], list(map(enum, wanted))
        waits = self._controls(op) if place.replaces else ()
        ahead = at(side).ahead and not place.replaces
        name = self.insertions.call_function(op, routine, refs, gives, ahead, waits)
        return self._given(place, name, given, wanted, side)

    def call(
        self, place: Insertion, given: Sequence[Value], wanted: Sequence[Any], side: Side
    ) -> list[Value]:
        """Write a node that calls Python; observers are packed with those of other operations."""
        assert isinstance(place, Node)
        op, refs, symbols = at(side).op, [one.ref for one in given], [one.symbol for one in given]
        ahead, instead = at(side).ahead, place.replaces
        if place.actions[0].observer:
            self.insertions.observe(op, place, refs, symbols, ahead)
            return []
        if place.facts.backward_op is not None and place.replaces:
            ahead, instead = False, False  # its operation runs all the same
        gives, types = list(map(enum, wanted)), list(map(enum, symbols))
        waits = self._controls(op) if place.reads else None
        name = self.insertions.add(op, place, refs, types, gives, ahead, instead, waits)
        return self._given(place, name, given, wanted, side)

    def _given(
        self, place: Node, name: str, given: Sequence[Value], wanted: Sequence[Any], side: Side
    ) -> list[Value]:
        """Return the values that a node gives, after noting where they and those it is given are kept."""
        insertions = self.insertions
        refs = [insertions.output_of(name, k) for k in range(len(wanted))]
        if not place.replaces:
            for k, one in enumerate(given):
                insertions.sources.setdefault(one.ref, (place.keeps, 0, k))
            if at(side).ahead and decides(at(side).op):
                refs[1:] = [insertions.passed(name, k, enum(wanted[k])) for k in range(1, len(wanted))]
        for k, ref in enumerate(refs):
            insertions.sources[ref] = (place.keeps, 1, k)
        return list(map(Value, refs, wanted))

    def _controls(self, op: tf.Operation) -> list[str]:
        node = self.body.nodes[self.body.node_name(op)]
        return [text for text in node.input if text.startswith("^")]


_KEPT = "what it gives is kept for a backward function in another graph"
