"""Frames that dynamo must skip, and guards: when it has to compile a graph for tools again, or to drop it.

The frames are those of Amanda's own code, and of the routines of tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from amanda import interceptor
from amanda.graph import History
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.types import ConvertFrameReturn

from .._compiled_callables import asks_for_graphs

if TYPE_CHECKING:
    from ._ops import GraphProgram

_SKIP = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
"""Run the frame, and all that it calls, without dynamo."""

SKIP_ONCE = ConvertFrameReturn(_SKIP, apply_to_code=False)
"""Dynamo's result for a frame that runs without dynamo in this call alone."""


def skip_result(frame: Any) -> ConvertFrameReturn | None:
    """Return dynamo's result for a frame that it must not convert; None for other frames.

    Amanda's own code is skipped for good. Other code is skipped once: a routine may be called elsewhere too.
    """
    # Frames of Amanda and of routines call the interceptor, which dynamo would trace into the user's graph.
    if interceptor.codes.is_ours(frame.f_code):
        return ConvertFrameReturn(_SKIP)
    return SKIP_ONCE if interceptor.active() is None else None


class CallbackForUserFrames:
    """Stand-in for dynamo's callback that converts frames of the user alone."""

    def __init__(self, callback: Any) -> None:
        self._torchdynamo_orig_backend = callback

    def __call__(self, frame: Any, *args: Any) -> Any:
        return skip_result(frame) or self._torchdynamo_orig_backend(frame, *args)


def guard_by_identity(nodes: Sequence[Any]) -> None:
    """Guard a graph by the identity of parameters, so that another model gets a graph of its own."""
    for node in nodes:
        source = node._dynamo_source
        if source is not None:
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def guard_by_reads(program: GraphProgram, history: History) -> None:
    """Guard the graph by the values that its routines read, so that a change retraces it.

    Reads that no guard can watch are reported.
    """
    reads = program.reads
    reads.settle()
    for entry in reads.unfollowed(program.traced, "a compiled graph"):
        program.report(*entry)
    history.take(reads)
    # Weakly: dynamo keeps guards as long as the user's function, which must not keep the tools alive.
    reference = ref(reads)

    def reads_hold(_: Any) -> bool:
        """Return True if all values that routines read are unchanged, or the graph runs without tools."""
        activation = interceptor.ACTIVATION.get(None)
        state = None if activation is None else activation.state
        if not (asks_for_graphs(state) and state.enabled):
            return True  # the graph runs without tools here, so their values do not matter
        reads = reference()
        return reads is not None and reads.hold()

    def guard(builder: Any, new_guard: Any) -> None:
        explanation = ["what traceable routines of Amanda's tools read is as it was"]
        builder.guard_manager.root.add_lambda_guard(reads_hold, explanation, new_guard.user_stack)

    # A source that always exists: the guard looks at no value of the frame.
    install_guard(GlobalStateSource().make_guard(guard))


def guard_by_lifetime(entries: object) -> None:
    """Make dynamo drop the entry that it is about to add once `entries`, held by a generation, ends."""

    def guard(builder: Any, new_guard: Any) -> None:
        builder.id_ref(entries, "tools of a scope")

    install_guard(GlobalStateSource().make_guard(guard))
