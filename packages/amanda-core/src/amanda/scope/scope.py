"""Scopes: the dynamic extent in which tools are applied."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar
from weakref import ReferenceType

from amanda import interceptor
from amanda.errors import ScopeError, ToolError
from amanda.interceptor.interrupts import uninterrupted
from amanda.options import checked, shown
from amanda.plan.tool_stack import stack_for
from amanda.plan.tools import AnyTool, hooks, in_dependency_order, interchangeable, is_tool
from amanda.scope.attachment import attachment
from amanda.scope.replay import run_async_steps_in, run_steps_in
from amanda.scope.report import Report, changed_options, describe_slow_calls
from amanda.scope.state import State, activated, notify_switched, reset_variable, update_activations

P = ParamSpec("P")
T = TypeVar("T")
Compiled = Literal["eager", "instrument"]


class Scope(interceptor.Extent):
    """The handle that `amanda.apply` gives: a context manager, a decorator, or `start`/`stop`.

    It may be entered again after it was left. `report` lists what could not be instrumented.

    Args:
        *tools: As in `amanda.apply`.
        compiled: As in `amanda.apply`.
    """

    def __init__(self, *tools: AnyTool, compiled: Compiled = "eager") -> None:
        for tool in tools:
            if not is_tool(tool):
                raise ToolError(f"apply wants tools, not {shown(tool)}{_hint_for(tool)}")
        self._tools = tools
        self.compiled = compiled
        # Two flags: an interrupt may come after the scope has closed and before its tools have been told.
        self._open = self._unsettled = False
        self._activation_token: object = None
        self._joined_tools: tuple[AnyTool, ...] = ()  # the tools that no scope around had open already
        self._statistics_at_entry = interceptor.statistics()
        # Those of the contexts in which it is open.
        self._activations: set[ReferenceType[interceptor.Activation]] = set()
        self._forked = False
        self.report = Report()
        # Called for its error: a cycle is reported where the scope is made, not where it opens.
        in_dependency_order(tools)

    @property
    def closed(self) -> bool:
        """Return True if the scope is not open anywhere."""
        return not self._open

    if TYPE_CHECKING:

        def __enter__(self) -> Scope: ...

    def _begin(self) -> Scope:
        """Open the scope, notify tools and plugins; undo all where one raises.  ScopeError if it is open."""
        if self._open:
            raise ScopeError(
                "this scope is open already; amanda.apply(...) makes another, and a decorated function "
                "gets one per call"
            )
        self._forked = False
        self._unsettled = True
        self._statistics_at_entry = interceptor.statistics()
        try:
            # Uninterrupted: a Ctrl-C between two of its steps would leave drivers attached without a scope.
            uninterrupted(self._activate)
            for tool in self._joined_tools:
                self._notify_entered(tool)
            hooks.call("amanda_scope_entered", scope=self)
        except BaseException:
            uninterrupted(self._deactivate)
            self._unsettled = False
            raise
        return self

    def _notify_entered(self, tool: AnyTool) -> None:
        """Notify a tool that the scope has opened; report options that have changed since the analyses."""
        tool._amanda.was_used = True
        for text in changed_options(tool):
            self.report.add(f"options of {type(tool).__name__}", text)
        tool.scope_entered()

    def _activate(self) -> None:
        """Attach drivers and activate the tools in this context; number ops outside of modules anew."""
        outer_state = State.current()
        # A tool acts once per op, at its outermost place.
        tools = [tool for tool in in_dependency_order(self._tools) if not outer_state.is_open(tool)]
        self._joined_tools = tuple(tools)
        stack = stack_for(tools, outer_state.stack) if tools else outer_state.stack
        state = replace(outer_state, stack=stack, scopes=(*outer_state.scopes, self))
        # A scope without tools of its own is opened to have calls seen, also within one that needs none.
        attachment.open(self, intercepts=not self._tools or stack is None or stack.intercepts)
        activation = state.activation()
        self._open = True
        # Before `set`, which may activate it and then fail to allocate the token.
        for scope in state.scopes:
            scope.add_activation(activation)
        self._activation_token = interceptor.ACTIVATION.set(activation)
        notify_switched()
        # Ids at the top level count from the start of the scope, so that each scope finds the same ids.
        interceptor.reset_root()

    def _end(self) -> None:
        """Close the scope and notify tools and plugins; complete an earlier call that was interrupted.

        Adds to the report if most calls ran in Python.  Raises ScopeError where the scope is not open.
        """
        if self._forked:  # the scope is open in the parent; in this child it was closed at the fork
            self._forked = False
            return
        if not self._unsettled:
            raise ScopeError("this scope is not open; start() or a with statement opens it")
        try:
            uninterrupted(self._deactivate)
        except BaseException:  # an interrupt may have come before `_deactivate` ran
            uninterrupted(self._deactivate)
            raise
        finally:
            with ExitStack() as notifications:  # every tool is notified, also after an exception of another
                for tool in reversed(self._joined_tools):
                    notifications.callback(self._notify_left, tool)
        self._unsettled = False
        slow_calls_text = describe_slow_calls(self._statistics_at_entry, interceptor.statistics())
        # A scope within, which is still open, will report the same calls.
        if slow_calls_text and not self._inner_scopes():
            self.report.add("calls of ops", slow_calls_text)
        hooks.call("amanda_scope_left", scope=self)

    def _notify_left(self, tool: AnyTool) -> None:
        """Notify a tool, once, that the scope has closed; report, once, selections that no op has matched."""

        def selection_in(sentence: str) -> str:
            return sentence.partition(";")[0]  # the names after it differ from scope to scope

        self._joined_tools = tuple(
            joined_tool for joined_tool in self._joined_tools if joined_tool is not tool
        )
        logged_selections = tool._amanda.logged
        subject = f"what was selected for {type(tool).__name__}"
        for sentence in tool.unmatched():
            selection = selection_in(sentence)
            reported_selections = {
                selection_in(entry.reason) for entry in self.report if entry.what == subject
            }
            if selection not in reported_selections:
                self.report.add(subject, sentence, is_logged=selection not in logged_selections)
            logged_selections.add(selection)
        tool.scope_left()

    def _deactivate(self) -> None:
        """Close the scope in all contexts, and detach drivers: undo the steps of opening that have run.

        If scopes within are still open, the outermost of these will restore the state from before.
        """
        token, self._open = self._activation_token, False
        inner_scopes = self._inner_scopes()
        interceptor.keep_failure(None)
        try:
            # With generators that take turns, an outer scope may close first: the inner scope then restores
            # the state from before both.
            if token is not None and inner_scopes:
                inner_scopes[0]._activation_token = token
            elif token is not None:
                reset_variable(interceptor.ACTIVATION, token)
            self._activation_token = None
        finally:
            try:
                update_activations(list(self._activations))
                notify_switched()
            finally:
                attachment.close(self)

    def _inner_scopes(self) -> list[Scope]:
        """Return the open scopes within this one, the outermost first, in this execution context."""
        activation = interceptor.ACTIVATION.get(None)
        scopes: tuple[Scope, ...] = () if activation is None else activation.state.scopes
        inner_scopes = scopes[scopes.index(self) + 1 :] if self in scopes else ()
        return [scope for scope in inner_scopes if not scope.closed]

    def add_activation(self, activation: interceptor.Activation) -> None:
        """Register an activation, in any context, that is updated when this scope or its tools change."""
        # Weak: contexts of tasks come and go while a scope is open.
        reference = ReferenceType(activation, self._activations.discard)
        self._activations.add(reference)
        if self.closed:  # another thread has closed it in the meantime
            update_activations([reference])

    def is_open_with(self, tool: AnyTool) -> bool:
        """Return True while the scope is open with a tool; False for a tool that a scope around has."""
        return self._open and any(joined_tool is tool for joined_tool in self._joined_tools)

    def update_routines(self) -> None:
        """Activate the present routines and dependencies of the tools from the next op on.

        Notifies new dependencies that the scope has opened.

        Raises:
            DependencyCycleError: For tools that depend on each other; then nothing has changed.
        """
        earlier_tools = self._joined_tools
        further_tools = [
            tool
            for tool in in_dependency_order(self._tools)
            if not any(interchangeable(tool, earlier_tool) for earlier_tool in earlier_tools)
        ]
        # Others have joined a scope around.
        new_dependencies = [tool for tool in further_tools if not scopes_with(tool)]
        self._joined_tools = (*new_dependencies, *earlier_tools)
        uninterrupted(lambda: update_activations(list(self._activations)))
        notify_switched()
        for tool in new_dependencies:
            self._notify_entered(tool)

    def start(self) -> Scope:
        """Open the scope until `stop`, across the cells of a notebook."""
        return self.__enter__()

    def stop(self) -> None:
        """Close a scope that `start` opened."""
        self.__exit__(None, None, None)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate a function: each call, or step of a generator, runs in a scope with these tools."""
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
                with self._fresh_scope():
                    return await function(*args, **kwargs)

            return run_coroutine  # type: ignore[return-value]
        if inspect.isgeneratorfunction(function):
            return run_steps_in(self._fresh_scope, function)
        if inspect.isasyncgenfunction(function):
            return run_async_steps_in(self._fresh_scope, function)

        @functools.wraps(function)
        def run_function(*args: P.args, **kwargs: P.kwargs) -> T:
            with self._fresh_scope():
                return function(*args, **kwargs)

        return run_function

    def _fresh_scope(self) -> Scope:
        """Return a scope with the same tools for one call, which adds to this scope's report."""
        # A scope for each call, since a function may call itself or run in several threads.
        scope = Scope(*self._tools, compiled=self.compiled)
        scope.report = self.report
        return scope

    def bind(self, function: Callable[P, T]) -> Callable[P, T]:
        """Return a function to be called on another thread, with this scope in force there until it closes.

        The scopes around this one, and their switches, are in force there too.

        Args:
            function: Function that another thread calls.

        Raises:
            ScopeError: Where the scope is not open.
        """
        state = State.current()
        if self not in state.scopes:
            raise ScopeError("bind carries an open scope to another thread; open it first")

        @functools.wraps(function)
        def run_bound(*args: P.args, **kwargs: P.kwargs) -> T:
            """Call the function in the state of the bound scope; as it is once that scope has closed."""
            if self.closed:
                return function(*args, **kwargs)
            with activated(state):
                return function(*args, **kwargs)

        return run_bound

    def __repr__(self) -> str:
        names = ", ".join(type(tool).__name__ for tool in self._tools)
        return f"<{'closed' if self.closed else 'open'} scope of {names or 'no tools'}>"


def _hint_for(value: object) -> str:
    """Return the end of the message for a value that is not a tool: what to write instead."""
    if isinstance(value, type):
        return f"; give an instance: {value.__name__}()"
    if isinstance(value, (list, tuple, set)):
        return "; give them one by one: apply(*tools)"
    if inspect.isroutine(value):
        return "; register a function in a tool: tool = amanda.Tool(); tool.add_inst_for_op(function)"
    # Of a model too, whose repr says what it is.
    return "; give instances of amanda.Tool, such as amanda.load_tool('flops'), and run models in the scope"


@checked(error=ScopeError)
def apply(*tools: AnyTool, compiled: Compiled = "eager") -> Scope:
    """Apply tools to what runs in a scope: every op of every supported framework, forward and backward.

    Tools that they depend on join by themselves.

    Args:
        *tools: Tools, in the order in which their routines run.  Without a tool nothing is instrumented.
        compiled: "eager" runs what torch.compile made op by op; "instrument" compiles it with routines in it.

    Returns:
        The scope: for `with`, as a decorator, or by its `start()` and `stop()`.  `scope.report` lists what
        could not be instrumented.

    Raises:
        ToolError: For what is not a tool.
        DependencyCycleError: If tools depend on each other in a circle.
        ScopeError: For another `compiled`.

    >>> import amanda
    >>> with amanda.apply(amanda.Tool()) as scope:
    ...     pass
    """
    return Scope(*tools, compiled=compiled)


def scopes_with(tool: AnyTool) -> list[Scope]:
    """Return the open scopes that a tool has joined: that apply it, and whose outer scopes do not."""
    return [scope for scope in attachment.scopes if scope.is_open_with(tool)]


def _close_in_child() -> None:
    """Close all scopes in a forked child, without notice to tools: it has the forking thread alone."""
    interceptor.forked()
    scopes = attachment.detach_in_child()
    for scope in scopes:
        scope._open = scope._unsettled = False
        scope._forked = True
    for scope in scopes:
        update_activations(list(scope._activations))


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
