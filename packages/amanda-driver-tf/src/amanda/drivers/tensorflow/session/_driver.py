"""The driver of session graphs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

from amanda import backend
from amanda.backend import Execution, GraphAnalysis, State
from tensorflow.python.eager import context

from .._requirements import check
from ..graph import GraphTensors, TensorFlowReads
from ._boundary import Boundary
from ._cone import Request
from ._copies import Asked, SessionRewriting, rewritten, route
from ._draws import SessionExecution
from ._run import Route


class GraphDriver(backend.GraphDriver[SessionRewriting, Route]):
    """TensorFlow's sessions: what they run is analysed, and a copy beside the user's graph runs instead."""

    api = 1
    framework = "tensorflow"
    modes = ("graph",)
    tensors = GraphTensors()
    reads = TensorFlowReads

    def __init__(self) -> None:
        super().__init__()
        self._boundary = Boundary(self._prepared)

    def attach(self) -> None:
        """Stand where runs of sessions begin."""
        check("graph")
        self._boundary.attach(self.attributes)

    def rewriting(self) -> AbstractContextManager[Any]:
        """Eager mode: routines that are traced are no part of the user's graph."""
        eager: AbstractContextManager[Any] = context.eager_mode()
        return eager

    def execution(self, state: State, table: Mapping[int, Any]) -> SessionExecution:
        """One run of a copy."""
        return SessionExecution(state, self.tensors, table)

    def rewrite(self, graph: Asked, analysis: GraphAnalysis) -> SessionRewriting:
        """Rewrite the part of a session's graph that a request runs."""
        return rewritten(graph, analysis, self.namespace)

    def runnable(self, graph: Asked, rewriting: SessionRewriting) -> Route:
        """Put the copy beside the user's nodes."""
        return route(graph, rewriting)

    def _prepared(self, session: Any, request: Request, state: State) -> tuple[Route, Execution] | None:
        if session._target:
            state.report("a session of a server", "routines cannot be called in its process")
            return None
        prepared = self.prepare(Asked(session, request), state, request, owner=session.graph)
        if prepared is None:
            return None
        found, execution = prepared
        assert isinstance(execution, SessionExecution)
        execution.session = ref(session)
        return found, execution
