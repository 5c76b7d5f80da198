"""Closing of a scope, and change of its tools: what stays in force in threads, tasks and contexts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from weakref import ReferenceType

from amanda import interceptor
from amanda.plan.tool_stack import ToolStack
from amanda.scope.state import State


def deactivate(references: Iterable[ReferenceType[interceptor.Activation]]) -> None:
    """Take closed scopes, and former routines of tools, out of activations, wherever these are in force."""
    activations = [referent for reference in references if (referent := reference()) is not None]
    try:
        for activation in activations:
            state = activation.state.remaining()
            activation.become(state.activation() if state.scopes else _inactive())
    except BaseException:  # a RecursionError, say
        for activation in activations:
            activation.active = False
        raise


@cache
def _inactive() -> interceptor.Activation:
    """An activation that intercepts nothing; its stack is for ops that are under way on other threads."""
    return interceptor.Activation(None, State(ToolStack((), None)), False)
