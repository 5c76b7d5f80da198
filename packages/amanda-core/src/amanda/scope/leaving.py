"""Closing of a scope: what stays in force in threads, tasks and contexts that outlive it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING
from weakref import ReferenceType

from amanda import interceptor
from amanda.plan.layer import Layer, layer_of
from amanda.plan.order import in_order
from amanda.scope.state import State

if TYPE_CHECKING:
    from amanda.scope.scope import Scope


def remaining(state: State) -> State:
    """Return the state without its closed scopes: State() where none is left."""
    scopes = tuple(scope for scope in state.scopes if not scope.closed)
    if len(scopes) == len(state.scopes):
        return state
    return replace(state, layer=_layer(scopes), scopes=scopes) if scopes else State()


def let_go(references: Iterable[ReferenceType[interceptor.Activation]]) -> None:
    """Take closed scopes out of activations, wherever these are in force, and let go of their tools."""
    left = [one for reference in references if (one := reference()) is not None]
    try:
        for activation in left:
            state = remaining(activation.state)
            activation.become(state.activation() if state.scopes else _nothing())
    except BaseException:  # a RecursionError, say
        for activation in left:
            activation.active = False
        raise


def _layer(scopes: Iterable[Scope]) -> Layer | None:
    layer = None
    for scope in scopes:
        so_far = State(layer)
        tools = [tool for tool in in_order(scope._tools) if not so_far.is_open(tool)]
        layer = layer_of(tools, layer) if tools else layer
    return layer


@cache
def _nothing() -> interceptor.Activation:
    """An activation that intercepts nothing; its layer is for ops that are under way on other threads."""
    return interceptor.Activation(None, State(Layer((), None)), False)
