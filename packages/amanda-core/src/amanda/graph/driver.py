"""The base of drivers for frameworks that run graphs, and the rewritten copies that run instead."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Collection, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from amanda import interceptor
from amanda.graph.execution import Execution
from amanda.graph.reads import GuardedCopies, Reads
from amanda.graph.rewriting import GraphAnalysis
from amanda.scope.driver import Driver

if TYPE_CHECKING:
    from amanda.graph.rewriting import Rewriting
    from amanda.plan.tensors import TensorOps
    from amanda.plan.tool_stack import ToolStack
    from amanda.scope.state import State

RewritingT = TypeVar("RewritingT", bound="Rewriting")
RunnableT = TypeVar("RunnableT")


class CannotInstrument(Exception):
    """Raised for a graph that has to run uninstrumented.

    Args:
        subject: Description of the graph for reports.
        reason: The reason for reports.
    """

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(subject, reason)


@dataclass(eq=False)
class RewrittenCopy(Generic[RunnableT]):
    """The result of one rewrite, for a stack of tools.

    runnable: runs instead of the graph; None where nothing is inserted.
    table: the routines that the copy calls.  reports: descriptions of uninstrumented parts, with reasons.
    gradient_data: data of the rewrite for graphs that compute gradients of this graph; None for no data.
    backward: copies of these gradient graphs, for the same tools.
    """

    stack: ToolStack
    runnable: RunnableT | None
    table: Mapping[int, Any]
    reports: Collection[tuple[str, str]]
    gradient_data: Any = None
    backward: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)


class GraphDriver(Driver, Generic[RewritingT, RunnableT]):
    """A driver of a framework that runs graphs: a rewritten copy runs instead of a graph.

    `attach` patches the functions with which the framework runs a graph.  A patched function calls `prepare`
    for the copy: the driver's `rewrite` walks through the graph with a `Rewriter`, and its `build_runnable`
    builds the copy.  A copy is built once for a graph and a set of tools, and again where a value has changed
    that traceable routines read.

    tensors: primitives of tensors, for symbols during analysis and for values during execution.
    reads_type: class that finds the framework's values which traceable routines may read.
    """

    tensors: ClassVar[TensorOps]
    reads_type: ClassVar[type[Reads]] = Reads

    def __init__(self) -> None:
        # Reentrant: to rewrite a graph, a driver may rewrite the graphs that it calls.
        self._lock = threading.RLock()

    @abstractmethod
    def rewrite(self, graph: Any, analysis: GraphAnalysis) -> RewritingT:
        """Rewrite a graph; return the rewriting.

        Exceptions of analysis routines pass through.

        Args:
            graph: Graph of the framework.
            analysis: Analysis of the graph's ops, for the `Rewriting`.

        Raises:
            CannotInstrument: Where the graph cannot be rewritten.
        """

    @abstractmethod
    def build_runnable(self, graph: Any, rewriting: RewritingT) -> RunnableT:
        """Build the object that runs instead of a graph, from a rewriting that has changed the graph.

        Args:
            graph: Graph of the framework.
            rewriting: Result of `rewrite`.

        Raises:
            CannotInstrument: Where the framework refuses the copy.
        """

    def rewriting_context(self) -> AbstractContextManager[Any]:
        """Return the context in which graphs are rewritten; nothing is instrumented in it."""
        return nullcontext()

    def new_execution(self, state: State, table: Mapping[int, Any]) -> Execution:
        """Return the execution of one run of a copy.

        Args:
            state: State of the thread that runs the graph.
            table: Routines of the copy by slot.
        """
        return Execution(state, self.tensors, table)

    def prepare(
        self, graph: Any, state: State, key: Hashable = (), owner: Any = None
    ) -> tuple[RunnableT, Execution] | None:
        """Return the copy that runs instead of a graph, and its execution; None where the graph runs itself.

        Adds what the copy could not instrument to the reports of the open scopes.

        Args:
            graph: Graph of the framework.
            state: State of the thread that runs the graph.
            key: Key that distinguishes copies of a graph, such as the fetched tensors.
            owner: Object with which the copies die, referenced weakly; None for the graph.
        """
        copy = self.find_or_build_copy(graph, state, key, owner)
        # At each run, since a scope may have opened that has no entries of this copy yet.
        state.report_all(copy, copy.reports)
        return None if copy.runnable is None else (copy.runnable, self.new_execution(state, copy.table))

    def find_or_build_copy(
        self,
        graph: Any,
        state: State,
        key: Hashable = (),
        owner: Any = None,
        forward: RewrittenCopy[RunnableT] | None = None,
    ) -> RewrittenCopy[RunnableT]:
        """Return a copy of a graph that fits the values which its routines read; build one if there is none.

        Without the cache each call builds one.

        Args:
            graph: Graph of the framework.
            state: State of the thread that runs the graph.
            key: Key that distinguishes copies of a graph, such as the fetched tensors.
            owner: Object with which the copies die, referenced weakly; None for the graph.
            forward: Copy of the graph whose gradients this graph computes in another run; None for none.
        """
        stack = state.stack if forward is None else forward.stack
        assert stack is not None
        # A gradient graph reads values that the copy of its forward graph stored, so it belongs to that copy.
        copies_by_owner = stack.rewrites if forward is None else forward.backward
        owner = graph if owner is None else owner
        copies_by_key = copies_by_owner.setdefault(owner, {}) if state.cache else {}
        # Routines of a copy take part in autodiff, or do not, for as long as it lives.
        full_key = state.autodiff, key
        # Without the lock: that a copy is found is the usual case, and dicts are safe to read.
        guarded_copies = copies_by_key.get(full_key)
        copy = None if guarded_copies is None else guarded_copies.find()
        if copy is None:
            # Another thread may have built the copy while this thread waited: look again under the lock.
            with self._lock:
                guarded_copies = copies_by_key.setdefault(full_key, GuardedCopies(self.reads_type))
                analysis = GraphAnalysis(state, self.tensors, stack, guarded_copies.history)
                copy = guarded_copies.find() or self._rewrite_and_store(
                    graph, owner, analysis, guarded_copies
                )
        return copy

    def _rewrite_and_store(
        self,
        graph: Any,
        owner: Any,
        analysis: GraphAnalysis,
        guarded_copies: GuardedCopies[RewrittenCopy[RunnableT]],
    ) -> RewrittenCopy[RunnableT]:
        """Build a copy and store it with the values that it depends on.

        Where the graph cannot be instrumented, or nothing is inserted, the copy has no `runnable`: the graph
        runs itself.  A rewrite that fails leaves no plans.
        """
        # Building a graph calls functions of the framework that an eager driver may intercept.
        with interceptor.Suspension(), self.rewriting_context():
            try:
                rewriting = self.rewrite(graph, analysis)
            except CannotInstrument as error:
                analysis.drop_plans()
                # Stored as well, so that the next call does not fail to rewrite the same graph once more.
                refused_copy = RewrittenCopy[RunnableT](
                    analysis.stack, runnable=None, table={}, reports=(error.args,)
                )
                guarded_copies.add(refused_copy, self.reads_type())
                return refused_copy
            except BaseException:
                analysis.drop_plans()
                raise
            analysis.release_symbols(owner)
            rewriting.report_unfollowed()
            runnable = None
            if rewriting.has_insertions:
                try:
                    runnable = self.build_runnable(graph, rewriting)
                except CannotInstrument as error:
                    rewriting.report(*error.args)
        reports = tuple(rewriting.reports)
        copy = RewrittenCopy(analysis.stack, runnable, rewriting.table, reports, rewriting.gradient_data)
        guarded_copies.add(copy, rewriting.reads)
        return copy
