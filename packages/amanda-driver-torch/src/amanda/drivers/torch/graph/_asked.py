"""Whether the scope that is open asks for graphs."""

from typing import TypeGuard

from amanda.backend import State


def asks_for_graphs(state: object) -> TypeGuard[State]:
    """Whether compiled callables are to be instrumented in this state."""
    if type(state) is not State or state.layer is None or not state.scopes:
        return False
    return state.scopes[-1].compiled == "instrument"
