"""Items put between a node's values and what reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from amanda.backend import Action, OpFacts

from ._inline import Inlined, inlined
from ._places import Call, Compute, Item, Place, inserted_at
from ._side import Side
from ._symbols import Symbol
from ._tracing import NotTraceable

if TYPE_CHECKING:
    from ._rewrite import Rewriting

_PYTHON_IN_BODY = "it is in a body of control flow, where Python cannot run: mark it @amanda.traceable"


class Insertions:
    """What is inserted into one graph.

    items: of the graph, to which it adds.  symbols: those of the graph, likewise.
    is_body: whether it is a body of control flow, in which there is no Python.
    """

    def __init__(
        self, rewriting: Rewriting, items: list[Item], symbols: dict[str, Symbol], is_body: bool
    ) -> None:
        self.rewriting = rewriting
        self.items = items
        self.symbols = symbols
        self.is_body = is_body

    def insert_all(self, actions: Sequence[Action], side: Side, facts: OpFacts) -> None:
        """Put routines at a side, those of one kind that follow one another together."""
        for (_, traceable), group in groupby(actions, lambda action: (action.observer, action.traceable)):
            for together in [[one] for one in group] if traceable else [list(group)]:
                self._insert(together, side, facts)

    def replace(
        self,
        action: Action,
        inputs: Side,
        outputs: Side,
        facts: OpFacts,
        original: Callable[[], Any] | None,
    ) -> bool:
        """Let a routine compute what the node would have; whether it does."""
        positions = inputs.selected([action.select])
        gives = outputs.changeable(outputs.selected([None]))
        given, out = inputs.flat(positions), outputs.flat(gives)
        if not all(symbol is None or symbol.is_tensor for symbol in outputs.symbols):
            self._refuse([action], facts, "what the op gives is no tensor")
            return False
        if action.reads:
            self._refuse([action], facts, "it reads inputs of other ops")
            return False
        layout = len(inputs.sizes), positions, [inputs.sizes[i] for i in positions], gives
        place = inserted_at([action], facts, layout, [self._dtype(outputs, i) for i in out])
        if action.takes_original:
            place.original = original and original()
        made = self._computed(place, inputs, given, [outputs.symbols[i] for i in out], facts)
        if made is None:
            return False
        for i, (ref, symbol) in zip(out, made, strict=True):
            outputs.refs[i], outputs.symbols[i] = ref, symbol
        self.rewriting.changed = True
        return True

    def _insert(self, actions: list[Action], side: Side, facts: OpFacts) -> None:
        positions = side.selected([action.select for action in actions])
        observing = actions[0].observer
        gives = [] if observing else side.changeable(positions)
        given, out = side.flat(positions), side.flat(gives)
        layout = len(side.sizes), positions, [side.sizes[i] for i in positions], gives
        place = inserted_at(actions, facts, layout, [self._dtype(side, i) for i in out])
        made = self._computed(place, side, given, [side.symbols[i] for i in out], facts)
        for i, (ref, symbol) in zip(out, made or (), strict=bool(made)):
            self.rewriting.changed = self.rewriting.changed or ref != side.refs[i]
            side.refs[i], side.symbols[i] = ref, symbol

    # ---- who computes it ----

    def _computed(
        self, place: Place, side: Side, given: Sequence[int], wanted: Sequence[Any], facts: OpFacts
    ) -> list[tuple[str, Any]] | None:
        """Names and symbols of what a place gives; None where the graph stays as it is there."""
        actions, rewriting = place.actions, self.rewriting
        why = self._untraced(actions) or self._restless(actions, facts)
        if why is None or (rewriting.written and not actions[0].observer and not _takes_run(actions)):
            made = self._folded(place, side, given)
            if made is not None:
                return made
        if why is None:
            try:
                return self._inline(place, side, given)
            except NotTraceable as error:
                why = str(error)
        if rewriting.written:
            self._refuse(actions, facts, why)
            return None
        for action in actions:
            if action.traceable and not self.is_body:
                rewriting.report(f"traceable {action} of {facts.name}", f"{why}, so it runs as Python")
        if self.is_body:
            self._refuse(actions, facts, why if actions[0].traceable else _PYTHON_IN_BODY)
            return None
        return self._called(place, side, given, wanted)

    @staticmethod
    def _untraced(actions: Sequence[Action]) -> str | None:
        """Why routines are not even tried to be traced; None where they are."""
        for action in actions:
            if not action.traceable:
                return "it is not marked @amanda.traceable"
            if action.takes_run:
                return "it takes `run`, which belongs to one execution"
            if action.takes_original:
                return "it takes `original`, which is called"
        return None

    def _restless(self, actions: Sequence[Action], facts: OpFacts) -> str | None:
        """Why routines are not traced once more; None where what they read has had few values."""
        changing = next(filter(None, map(self.rewriting.history.restless, actions)), None)
        if changing is None:
            return None
        why = f"what it reads changes often: {changing}"
        if not self.is_body:
            return why
        for action in actions:
            self.rewriting.report(
                f"traceable {action} of {facts.name}",
                f"{why}, and each time another copy of the model is made",
            )
        return None

    @contextmanager
    def _tracing(self, place: Place) -> Iterator[None]:
        with self.rewriting.reads.tracing(place.actions):
            yield
        self.rewriting.traced += [(action, ()) for action in place.actions]

    def _folded(self, place: Place, side: Side, given: Sequence[int]) -> list[tuple[str, Any]] | None:
        """What the routines make of constants; None where they are given others too."""
        symbols = [side.symbols[i] for i in given]
        if not given or not all(symbol is not None and symbol.constant is not None for symbol in symbols):
            return None
        constants: list[Any] = [symbol.constant for symbol in symbols if symbol is not None]
        with self._tracing(place):
            arrays = place.evaluate(constants, self.rewriting.ops, self.rewriting.state)
        self.rewriting.folded += place.actions
        known = {id(one.constant): (side.refs[i], one) for i, one in zip(given, symbols, strict=True) if one}
        return [known.get(id(one)) or self._constant(one) for one in arrays]

    def _constant(self, array: Any) -> tuple[str, Symbol]:
        name = self.rewriting.fresh("constant")
        self.rewriting.constants[name] = array
        self.rewriting.changed = True
        self.symbols[name] = symbol = Symbol.of_array(name, array)
        return name, symbol

    def _inline(self, place: Place, side: Side, given: Sequence[int]) -> list[tuple[str, Any]]:
        rewriting = self.rewriting
        with self._tracing(place):
            routine: Inlined = inlined(
                place, [side.refs[i] for i in given], [side.symbols[i] for i in given], rewriting
            )
        self.items += [Compute(node) for node in routine.nodes]
        rewriting.constants |= routine.constants
        for name, symbol in routine.symbols.items():
            self.symbols.setdefault(name, symbol)
        return [(symbol.name, symbol) for symbol in routine.outputs]

    def _called(
        self, place: Place, side: Side, given: Sequence[int], wanted: Sequence[Any]
    ) -> list[tuple[str, Any]]:
        rewriting = self.rewriting
        slot = len(rewriting.table)
        rewriting.table[slot] = place
        rewriting.changed = True
        free = rewriting.state.autodiff or any(
            action.differentiable or action.type.is_replacement for action in place.actions
        )
        rewriting.free = rewriting.free or (free and bool(wanted))
        made = [symbol.like(rewriting.fresh("given"), not free) for symbol in wanted]
        for symbol in made:
            self.symbols[symbol.name] = symbol
        waits = [] if made else [ref for ref in (*side.before, *side.refs) if ref]
        self.items.append(Call(slot, [side.refs[i] for i in given], [symbol.name for symbol in made], waits))
        return [(symbol.name, symbol) for symbol in made]

    # ---- what is not done ----

    def _refuse(self, actions: Sequence[Action], facts: OpFacts, why: str) -> None:
        for action in actions:
            self.rewriting.refused.append((facts, action, why))
            if not self.rewriting.written:
                self.rewriting.report(f"{action} of {facts.op.name} ({facts.name})", why)
                action.tool.refused(action, why)

    @staticmethod
    def _dtype(side: Side, index: int) -> Any:
        symbol = side.symbols[index]
        return None if symbol is None else symbol.dtype


def _takes_run(actions: Sequence[Action]) -> bool:
    return any(action.takes_run for action in actions)
