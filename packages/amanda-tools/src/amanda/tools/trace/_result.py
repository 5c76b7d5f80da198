"""The graph as a table, and the files that it goes to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.options import checked
from amanda.tools.results import NOTHING, Column, Result, read_json, shortened
from amanda.tools.trace._graph import VERSION, Graph, Position
from amanda.tools.trace._model_explorer import collection
from amanda.tools.trace._text import dot, listing

if TYPE_CHECKING:
    import networkx


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
        Column("calls", show="{:,}".format, number=True, folded="sum"),
    )  # fmt: skip

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op."""
        return [
            (op.phase, op.type, op.module, op.source, self._tensors(op.inputs),
             self._tensors((*op.outputs, *op.writes)), op.calls)
            for op in self.graph.ops
        ]  # fmt: skip

    def _tensors(self, positions: Sequence[Position]) -> str:
        return " ".join(
            f"({self._tensors(one)})" if isinstance(one, tuple) else str(self.graph.tensors[one])
            for one in positions
            if one is not None
        )

    def facts(self) -> Mapping[str, Any]:
        """Return the graph."""
        return self.graph.to_dict()

    @property
    def leading(self) -> int:
        """The numbers of ops and tensors come first."""
        return 1

    def notes(self) -> Sequence[str]:
        """Return how much there is, and what is not in the graph."""
        if not self.graph.ops:
            return [NOTHING]
        counts = {"forward": 0, "backward": 0, **Counter(op.phase for op in self.graph.ops)}
        *others, last = (f"{count:,} {phase}" for phase, count in counts.items())
        notes = [f"{', '.join(others)} and {last} ops, {len(self.graph.tensors):,} tensors."]
        if self.graph.dropped:
            notes.append(f"{self.graph.dropped:,} more ops were not recorded; `limit` says how many are.")
        return notes

    def to_networkx(self) -> networkx.MultiDiGraph[int]:
        """Return the graph as `Graph.to_networkx` does."""
        return self.graph.to_networkx()

    def to_dot(self) -> str:
        """Return a graph for Graphviz."""
        return dot(self.graph)

    def to_text(self) -> str:
        """Return a line for each op, in the manner of ONNX's listings."""
        return listing(self.graph)

    def to_model_explorer(self) -> str:
        """Return JSON that Model Explorer opens."""
        return json.dumps(collection(self.graph), indent=1)

    def _forms(self) -> dict[str, Callable[[], str]]:
        forms = {".txt": self.to_text, ".dot": self.to_dot, ".model-explorer.json": self.to_model_explorer}
        return {**super()._forms(), **forms}


@checked
def load(path: str | Path) -> Graph:
    """Return the graph of a file that `save` wrote as JSON.

    Raises AmandaError for a file that is no graph, or of a newer version.
    """
    return read_json(path, "file of a graph", Graph.from_dict)
