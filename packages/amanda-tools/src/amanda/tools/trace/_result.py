"""The graph as a table, and the files that it goes to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.results import Column, Result, read_json, shortened
from amanda.tools.trace._graph import VERSION, Graph, Op, Position
from amanda.tools.trace._model_explorer import collection
from amanda.tools.trace._text import dot, listing

if TYPE_CHECKING:
    import networkx

MODEL_EXPLORER = ".model-explorer.json"


class TraceResult(Result):
    """The ops of a graph in the order in which they were first executed.

    `save` writes, by the suffix: the schema `amanda.trace` (.json), a listing (.txt), Graphviz (.dot), what
    Model Explorer opens (.model-explorer.json), and the table (.csv, .html).
    """

    name: ClassVar[str] = "trace"
    version: ClassVar[int] = VERSION
    title = "Graph"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=36)),
        Column("source", show=partial(shortened, width=36)), Column("inputs"), Column("outputs"),
        Column("calls", show="{:,}".format, number=True),
    )  # fmt: skip

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def rows(self) -> Sequence[Sequence[Any]]:
        """A row for each op."""
        return [
            (op.phase, op.type, op.module, op.source, self._shapes(op.inputs),
             self._shapes((*op.outputs, *op.writes)), op.calls)
            for op in self.graph.ops
        ]  # fmt: skip

    def _shapes(self, positions: Sequence[Position]) -> str:
        return " ".join(self._shape(one) for one in positions if one is not None)

    def _shape(self, position: Position) -> str:
        if isinstance(position, tuple):
            return f"({self._shapes(position)})"
        return "" if position is None else str(self.graph.tensors[position])

    def facts(self) -> Mapping[str, Any]:
        """The graph."""
        return self.graph.to_dict()

    def notes(self) -> Sequence[str]:
        """Return the number of ops and tensors, and what is not in the graph."""
        ops: Sequence[Op] = self.graph.ops
        counts = {"forward": 0, "backward": 0, **Counter(op.phase for op in ops)}
        *others, last = (f"{count:,} {phase}" for phase, count in counts.items())
        notes = [f"{', '.join(others)} and {last} ops, {len(self.graph.tensors):,} tensors."]
        if self.graph.dropped:
            notes.append(f"{self.graph.dropped:,} more ops were not recorded; `limit` says how many are.")
        return notes

    # ---- forms ----

    def to_networkx(self) -> networkx.MultiDiGraph[int]:
        """As `Graph.to_networkx`."""
        return self.graph.to_networkx()

    def to_dot(self) -> str:
        """A graph for Graphviz."""
        return dot(self.graph)

    def to_text(self) -> str:
        """A line for each op, in the manner of ONNX's listings."""
        return listing(self.graph)

    def to_model_explorer(self) -> str:
        """JSON that Model Explorer opens."""
        return json.dumps(collection(self.graph), indent=1)

    def save(self, path: str | Path) -> Path:
        """Write a file in the form that its suffix names.

        Raises AmandaError for a suffix that names none; then nothing is written.
        """
        path = Path(path)
        if path.name.endswith(MODEL_EXPLORER):
            path.write_text(f"{self.to_model_explorer()}\n", encoding="utf-8")
            return path
        return super().save(path)

    def _forms(self) -> dict[str, Callable[[], str]]:
        return {**super()._forms(), ".txt": self.to_text, ".dot": self.to_dot}


def load(path: str | Path) -> Graph:
    """The graph of a file that `save` wrote as JSON.

    Raises AmandaError for a file that is no graph, or of a later version.
    """
    return read_json(path, "file of a graph", Graph.from_dict)
