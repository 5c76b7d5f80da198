"""The base of drivers for frameworks that run graphs."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Collection, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from amanda import interceptor
from amanda.graph.analysis import GraphAnalysis
from amanda.graph.execution import Execution
from amanda.graph.guards import GuardedCopies
from amanda.graph.reads import Reads
from amanda.scope.driver import Driver

if TYPE_CHECKING:
    from amanda.graph.rewriting import Rewriting
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tool_stack import ToolStack
    from amanda.scope.state import State

RewritingT = TypeVar("RewritingT", bound="Rewriting")
RunnableT = TypeVar("RunnableT")


class Uninstrumented(Exception):
    """A graph that runs as it is; what it is, and why, for the scopes' reports."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)


@dataclass(eq=False)
class Copy(Generic[RunnableT]):
    """The result of one rewrite, for a stack of tools.

    runnable: runs instead of the graph; None where nothing is inserted.
    table: the routines that it calls.  reports: what could not be instrumented, and why.
    handed_on: what the rewriting has left for graphs that compute gradients of this one; None for nothing.
    backward: copies of these graphs, for the same tools.
    """

    stack: ToolStack
    runnable: RunnableT | None
    table: Mapping[int, Any]
    reports: Collection[tuple[str, str]]
    handed_on: Any = None
    backward: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)


class GraphDriver(Driver, Generic[RewritingT, RunnableT]):
    """A driver of a framework that runs graphs: a rewritten copy runs instead of a graph.

    `attach` puts stand-ins where the framework begins to run a graph.  A stand-in asks `prepare` for the
    copy: what the driver's `runnable` made of a graph that its `rewrite` has gone through, by a `Rewriter`.
    A copy is made once for a graph and a set of tools, and anew where a value changed that traceable
    routines read.

    tensors: the primitives of tensors: of symbols while a graph is analysed, of values while it runs.
    reads: the values of the framework that traceable routines may read.
    """

    tensors: ClassVar[TensorOps]
    reads: ClassVar[type[Reads]] = Reads

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @abstractmethod
    def rewrite(self, graph: Any, analysis: GraphAnalysis) -> RewritingT:
        """Rewrite a graph; `analysis` is for the `Rewriting`.

        Raises Uninstrumented where the graph is out of reach, and what analysis routines raise.
        """

    @abstractmethod
    def runnable(self, graph: Any, rewriting: RewritingT) -> RunnableT:
        """Make what runs instead of a graph, of a rewriting that has changed it.

        Raises Uninstrumented where the framework refuses the copy.
        """

    def rewriting(self) -> AbstractContextManager[Any]:
        """Return the context in which graphs are rewritten; nothing is instrumented in it."""
        return nullcontext()

    def execution(self, state: State, table: Mapping[int, Any]) -> Execution:
        """Return the execution of one run of a copy."""
        return Execution(state, self.tensors, table)

    def prepare(
        self, graph: Any, state: State, key: Hashable = (), owner: Any = None
    ) -> tuple[RunnableT, Execution] | None:
        """Return the copy that runs instead of a graph, and its execution; None where the graph runs itself.

        key: what tells copies of a graph apart, such as what is fetched.  owner: the copies live as long as
        it does, and it is referenced weakly; by default the graph.
        """
        copy = self.copy(graph, state, key, owner)
        state.report_all(copy, copy.reports)
        return None if copy.runnable is None else (copy.runnable, self.execution(state, copy.table))

    def copy(
        self,
        graph: Any,
        state: State,
        key: Hashable = (),
        owner: Any = None,
        forward: Copy[RunnableT] | None = None,
    ) -> Copy[RunnableT]:
        """Return the copy of a graph; it is made where there is none that holds now.

        key, owner: as `prepare` has them.  forward: the copy of the graph that this one computes gradients
        of, in another run, if it is another.
        """
        stack = state.stack if forward is None else forward.stack
        assert stack is not None
        all_copies = stack.rewrites if forward is None else forward.backward
        owner = graph if owner is None else owner
        copies = all_copies.setdefault(owner, {}) if state.cache else {}
        key = state.autodiff, key
        kept = copies.get(key)
        copy = None if kept is None else kept.find()
        if copy is None:
            with self._lock:
                kept = copies.setdefault(key, GuardedCopies(self.reads))
                analysis = GraphAnalysis(state, self.tensors, stack, kept.history)
                copy = kept.find() or self._make(graph, owner, analysis, kept)
        return copy

    def _make(
        self, graph: Any, owner: Any, analysis: GraphAnalysis, kept: GuardedCopies[Copy[RunnableT]]
    ) -> Copy[RunnableT]:
        with interceptor.Suspension(), self.rewriting():
            try:
                rewriting = self.rewrite(graph, analysis)
            except Uninstrumented as error:
                analysis.forget()
                copy = Copy[RunnableT](analysis.stack, None, {}, (error.args,))
                kept.add(copy, self.reads())
                return copy
            except BaseException:
                analysis.forget()
                raise
            analysis.finish(owner)
            rewriting.tell_unfollowed()
            runnable = None
            if rewriting.changed:
                try:
                    runnable = self.runnable(graph, rewriting)
                except Uninstrumented as error:
                    rewriting.report(*error.args)
        reports = tuple(rewriting.reports)
        copy = Copy(analysis.stack, runnable, rewriting.table, reports, rewriting.handed_on)
        kept.add(copy, rewriting.reads)
        return copy
