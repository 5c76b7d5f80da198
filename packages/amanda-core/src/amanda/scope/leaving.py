"""Activations in threads, tasks and contexts after a scope has closed or its tools have changed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from weakref import ReferenceType

from amanda import interceptor
from amanda.plan.tool_stack import ToolStack
from amanda.scope.state import State


def deactivate(references: Iterable[ReferenceType[interceptor.Activation]]) -> None:
    """Remove closed scopes, and former routines of tools, from activations in all contexts, in place."""
    activations = [referent for reference in references if (referent := reference()) is not None]
    try:
        for activation in activations:
            state = activation.state.remaining()
            activation.become(state.activation() if state.scopes else _inactive())
    except BaseException:  # such as a RecursionError: rather no instrumentation than that of a closed scope
        for activation in activations:
            activation.active = False
        raise


@cache
def _inactive() -> interceptor.Activation:
    """An activation that intercepts nothing; its stack is for ops that are under way on other threads."""
    return interceptor.Activation(None, State(ToolStack((), None)), False)
