"""Requests of scopes for graphs, and what torch needs to have to give them."""

import sys
from typing import TypeGuard

from amanda.backend import State

from ._requirements import found

OP_BY_OP = "it lacks what graphs are instrumented with, so that compiled callables run op by op in scopes"


def asks_for_graphs(state: object) -> TypeGuard[State]:
    """Return True if compiled callables are to be instrumented in this state."""
    if type(state) is not State or state.stack is None or not state.scopes:
        return False
    return state.scopes[-1].compiled == "instrument"


def has_stances() -> bool:
    """Return True if dynamo, once imported, can be told what to do with what it has compiled (torch 2.6)."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return hasattr(frames, "_callback_from_stance") and found("compiler.set_stance") is not None
