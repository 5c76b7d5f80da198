"""The driver of session graphs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

from amanda import backend
from amanda.backend import Execution, Exercise, GraphAnalysis, State
from tensorflow.python.eager import context

from .._requirements import NEWEST_TESTED, PRIVATE_NAMES, session_exercise
from ..graph import GraphTensorOps, TensorFlowReads
from ._boundary import SessionBoundary
from ._copies import Route, SessionRewriting, SessionRun, add_copy, rewrite_run
from ._kernel_state import SessionExecution
from ._operations import RunRequest


class GraphDriver(backend.GraphDriver[SessionRewriting, Route]):
    """Instruments TensorFlow's sessions: runs edited copies beside the operations of the user's graph."""

    api = 1
    framework = "tensorflow"
    modes = ("graph",)
    newest_tested = NEWEST_TESTED
    private_names = PRIVATE_NAMES["graph"]
    tensors = GraphTensorOps()
    reads = TensorFlowReads

    def __init__(self) -> None:
        super().__init__()
        self._boundary = SessionBoundary(self._prepare_run)

    def attach(self) -> None:
        """Patch the methods through which sessions run."""
        self._boundary.attach(self.attributes)

    def exercise(self) -> Exercise:
        """Return a program of a session with one op, and its gradient."""
        return session_exercise()

    def rewriting(self) -> AbstractContextManager[Any]:
        """Return a context of eager mode, so that traced routines do not enter the user's graph."""
        eager: AbstractContextManager[Any] = context.eager_mode()
        return eager

    def execution(self, state: State, table: Mapping[int, Any]) -> SessionExecution:
        """Return the execution of one run of a copy."""
        return SessionExecution(state, self.tensors, table)

    def rewrite(self, graph: SessionRun, analysis: GraphAnalysis) -> SessionRewriting:
        """Rewrite the part of a session's graph that a request runs."""
        return rewrite_run(graph, analysis, self.namespace)

    def runnable(self, graph: SessionRun, rewriting: SessionRewriting) -> Route:
        """Put the copy beside the user's nodes."""
        return add_copy(graph, rewriting)

    def _prepare_run(self, session: Any, request: RunRequest, state: State) -> tuple[Route, Execution] | None:
        """Return the route and the execution of a run; None where it runs uninstrumented."""
        if session._target:
            state.report("a session of a server", "routines cannot be called in its process")
            return None
        # The copies belong to the graph: they are nodes of it, and die with it.
        prepared = self.prepare(SessionRun(session, request), state, request, owner=session.graph)
        if prepared is None:
            return None
        route, execution = prepared
        assert isinstance(execution, SessionExecution)
        execution.session = ref(session)
        return route, execution
