"""The state of an execution context: open scopes with their tools, and the switches of the control API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING
from weakref import ReferenceType

from amanda import interceptor
from amanda.errors import ScopeError
from amanda.plan.tool_stack import ToolStack, stack_for
from amanda.plan.tools import in_dependency_order

if TYPE_CHECKING:
    from amanda.plan.run_dicts import RecomputedExecutions, RunRecord
    from amanda.plan.tools import AnyTool
    from amanda.scope.scope import Scope


@dataclass(frozen=True, eq=False)
class State:
    """The stack of tools, open scopes and switches; immutable: a scope or a switch activates another state.

    stack: the tools of the open scopes; None without a scope.  scopes: the open scopes.
    enabled, cache, autodiff: the switches of `amanda.enabled`, `cache_enabled` and `autodiff_enabled`.
    checkpoint_records: records of the enclosing checkpoints, which a framework may recompute.
    recomputed_executions: the executions that are recomputed here; None outside of a recomputation.
    """

    stack: ToolStack | None = None
    scopes: tuple[Scope, ...] = ()
    enabled: bool = True
    cache: bool = True
    autodiff: bool = False
    checkpoint_records: tuple[RunRecord, ...] = ()
    recomputed_executions: RecomputedExecutions | None = None

    @staticmethod
    def current() -> State:
        """Return the state of this execution context; one without scopes if a scope of it has closed."""
        activation = interceptor.ACTIVATION.get(None)
        state: State = _OUTSIDE if activation is None else activation.state
        # An activation that `update_activations` has emptied keeps a stack for ops that are under way.
        is_emptied = state.stack is not None and not state.scopes
        return _OUTSIDE if is_emptied or any(scope.closed for scope in state.scopes) else state

    @property
    def intercepts(self) -> bool:
        """Return True if ops are intercepted: a tool needs it, and instrumentation is enabled."""
        return self.enabled and self.stack is not None and self.stack.intercepts

    @property
    def may_recompute(self) -> bool:
        """Return True if executions may be recomputations, or be recomputed."""
        return bool(self.checkpoint_records) or self.recomputed_executions is not None

    @property
    def reuses_native_hooks(self) -> bool:
        """Return True if native hooks at a backward op may be reused in the next pass.

        They are reused with the cache on and autodiff off, outside of recomputations.
        """
        return self.cache and not self.autodiff and self.recomputed_executions is None

    def is_open(self, tool: AnyTool) -> bool:
        """Return True if a scope is open with this tool, or with an interchangeable one."""
        return self.stack is not None and self.stack.has_tool(tool)

    def report(self, subject: str, reason: str, where: str = "") -> None:
        """Add an uninstrumented part of the program, with reason and line, to the reports of open scopes.

        Args:
            subject: As in `Report.add`.
            reason: As in `Report.add`.
            where: As in `Report.add`.
        """
        for scope in self.scopes:
            scope.report.add(subject, reason, where)

    def report_all(self, source: object, entries: Collection[tuple[str, ...]]) -> None:
        """Add the entries of one source, such as a graph, to the open scopes' reports, if it is new to them.

        Args:
            source: Hashable, and held weakly.
            entries: Subject, reason and line of each entry.
        """
        if entries:
            for scope in self.scopes:
                scope.report.add_all(source, entries)

    def without_closed_scopes(self) -> State:
        """Return the state of the scopes that are open, with the present routines; State() if none is.

        Returns this state itself where nothing has changed.
        """
        open_scopes = tuple(scope for scope in self.scopes if not scope.closed)
        is_stack_current = self.stack is None or self.stack.is_current
        # The same object, so that the caller sees that nothing has changed.
        if len(open_scopes) == len(self.scopes) and (is_stack_current or not open_scopes):
            return self
        if not open_scopes:
            return State()
        return replace(self, stack=_stack_of_scopes(open_scopes), scopes=open_scopes)

    def activation(self) -> interceptor.Activation:
        """Return the activation that the interceptor reads while this state is in force."""
        # Without a table native code finds no plan, and every call comes to Python.
        table = self.stack.table if self.stack is not None and self.cache else None
        # Part of the key of native programs: executions that are recorded or recalled need other dicts `run`.
        if self.recomputed_executions is not None:
            variant = _RECALLED
        else:
            variant = _RECORDED if self.checkpoint_records else _ORDINARY
        return interceptor.Activation(table, self, self.intercepts, not self.autodiff, variant)


_ORDINARY, _RECORDED, _RECALLED = 0, 1, 2  # variants of an activation


when_enabled_again: list[Callable[[], None]] = []
"""Called as a `disabled` context is left: views catch up with writes that were not seen inside."""

when_switched: list[Callable[[], None]] = []
"""Called when another state has been put in force on the calling thread."""


def notify_switched() -> None:
    """Call the functions in `when_switched`, after the state of this thread has changed."""
    for follow in when_switched:
        follow()


_OUTSIDE = State()


def _stack_of_scopes(scopes: Iterable[Scope]) -> ToolStack | None:
    """Return the stack of nested scopes, the outermost first; each tool is only in the first that has it.

    None where no scope has a tool.
    """
    stack = None
    for scope in scopes:
        outer_state = State(stack)
        tools = [tool for tool in in_dependency_order(scope._tools) if not outer_state.is_open(tool)]
        stack = stack_for(tools, stack) if tools else stack
    return stack


@contextmanager
def in_force(activation: interceptor.Activation) -> Iterator[None]:
    """Put an activation in force, also on a thread that the framework started."""
    token = interceptor.ACTIVATION.set(activation)
    try:
        notify_switched()
        yield
    finally:
        reset_variable(interceptor.ACTIVATION, token)
        notify_switched()


def reset_variable(variable: ContextVar[interceptor.Activation], token: object) -> None:
    """Undo a `set` of a context variable, also in another context, as of a notebook or an event loop.

    Raises ScopeError if it was undone before.
    """
    try:
        variable.reset(token)  # type: ignore[arg-type]
    except ValueError:  # the token is of another context: set the earlier value in this one
        earlier = token.old_value  # type: ignore[attr-defined]
        had_value = isinstance(earlier, interceptor.Activation)
        variable.set(earlier if had_value else _OUTSIDE.activation())
    except RuntimeError as error:
        raise ScopeError("this switch was left already") from error


def activated(state: State) -> AbstractContextManager[None]:
    """Return a context with a state in force; scopes that close in the meantime are removed from it."""
    if state.stack is not None and not state.stack.is_current:
        # A tool was changed since the state was handed to a thread.
        state = state.without_closed_scopes()
    activation = state.activation()
    for scope in state.scopes:
        # A scope that closes on another thread has to find this activation and end it.
        scope.add_activation(activation)
    return in_force(activation)


def update_activations(references: Iterable[ReferenceType[interceptor.Activation]]) -> None:
    """Remove closed scopes, and former routines of tools, from activations in all contexts, in place.

    Where that raises, the activations intercept nothing from now on.
    """
    # Held while they are changed, so that none dies in the middle.
    activations = [referent for reference in references if (referent := reference()) is not None]
    try:
        for activation in activations:
            state = activation.state.without_closed_scopes()
            activation.become(state.activation() if state.scopes else _inactive_activation())
    except BaseException:  # such as a RecursionError: rather no instrumentation than that of a closed scope
        for activation in activations:
            activation.active = False
        raise


@cache
def _inactive_activation() -> interceptor.Activation:
    """Return an activation that intercepts nothing; its stack is for ops under way on other threads."""
    return interceptor.Activation(None, State(ToolStack((), None)), False)


@contextmanager
def _with_switches(**changes: bool) -> Iterator[None]:
    """Put the current state with changed fields in force.  changes: `enabled`, `cache` or `autodiff`."""
    with activated(replace(State.current(), **changes)):  # type: ignore[arg-type]
        yield


def enabled() -> AbstractContextManager[None]:
    """Instrument inside this context, also within `disabled`."""
    return _with_switches(enabled=True)


@contextmanager
def disabled() -> Iterator[None]:
    """Instrument nothing inside this context."""
    try:
        with _with_switches(enabled=False):
            yield
    finally:
        for catch_up in when_enabled_again:
            catch_up()


def cache_enabled() -> AbstractContextManager[None]:
    """Cache plans inside this context: an op's analysis runs once."""
    return _with_switches(cache=True)


def cache_disabled() -> AbstractContextManager[None]:
    """Cache no plans inside this context: an op's analysis runs at each execution."""
    return _with_switches(cache=False)


def autodiff_enabled() -> AbstractContextManager[None]:
    """Make every routine take part in the backward pass, as if marked `@differentiable`."""
    return _with_switches(autodiff=True)


def autodiff_disabled() -> AbstractContextManager[None]:
    """Keep routines outside the backward pass, unless they are marked `@differentiable`."""
    return _with_switches(autodiff=False)


def is_enabled() -> bool:
    """Return True if scopes instrument here."""
    return State.current().enabled


def is_cache_enabled() -> bool:
    """Return True if plans are kept here."""
    return State.current().cache
