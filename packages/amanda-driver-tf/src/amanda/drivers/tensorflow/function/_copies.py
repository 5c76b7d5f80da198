"""Copies of functions among those of the runtime, and what is known of forward functions."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from amanda.backend import OpFacts
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function

from ..graph import Location, Rewriting
from ..graph._facts import facts_of, grouped_outputs
from ._options import is_torn


class Runnable:
    """A copy of a function among those of the runtime.

    name: the runtime's name of it.  vanilla: that of the function.
    torn: whether routines keep nearly all of its operators apart.
    """

    def __init__(self, vanilla: str, definitions: Sequence[Any]) -> None:
        """Register the copy, which comes last, and the functions that it calls."""
        self._vanilla = vanilla
        self.torn = is_torn(definitions)
        self._handles: list[Any] = []
        current = context.context()
        for definition in definitions:
            self.name = definition.signature.name.encode()
            if not current.has_function(self.name):
                current.add_function_def(definition)
            self._handles.append(atomic_function.AtomicFunction(self.name, current, None))

    def in_vanilla_terms(self, error: Any) -> None:
        """Name, in an operation's error, the function that the user knows."""
        error._message = error._message.replace(self.name.decode(), self._vanilla)


class Forward:
    """Results of rewriting a forward function that the rewriting of its backward functions needs.

    identity: of its graph.  plans: of its operations, by their ids.
    tables: those of `Rewriting` that are about forward operations.
    ids: of the operations, with the layers that they lie in, as long as their graph lives.
    """

    _TABLES = ("kept", "shared", "taped", "depths")

    def __init__(self, rewriting: Rewriting, identity: int) -> None:
        self.identity = identity
        self.plans = rewriting.analysis.plans
        self.tables = {name: getattr(rewriting, name) for name in self._TABLES}
        self.ids: weakref.WeakKeyDictionary[Any, dict[int, Location]] = weakref.WeakKeyDictionary()
        for op, known in rewriting.ids.items():
            self.ids[op] = {op_id: Location(facts.scope, facts.aliases) for op_id, facts in known.items()}
        self.callees: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
        for op, graphs in rewriting.callees.items():
            self.callees[op] = {place: weakref.ref(graph) for place, graph in graphs.items()}

    def hand_on(self, rewriting: Rewriting) -> None:
        """Give the rewriting of a backward function the facts of the forward operations."""
        rewriting.analysis.plans.update(self.plans)
        for name, table in self.tables.items():
            getattr(rewriting, name).update(table)
        for op, graphs in self.callees.items():
            rewriting.callees[op] = {place: graph() for place, graph in graphs.items()}
        rewriting.origin = lambda op, op_id: self._origin(rewriting, op, op_id)

    def _origin(self, rewriting: Rewriting, op: Any, op_id: int | None) -> tuple[int, OpFacts] | None:
        known = self.ids.get(op)
        if not known:
            return None
        if op_id is None or op_id not in known:
            op_id = next(reversed(known))
        facts = facts_of(op, op_id, rewriting.namespace, place=known[op_id])
        facts.outputs = grouped_outputs(op, op.node_def)
        return op_id, facts
