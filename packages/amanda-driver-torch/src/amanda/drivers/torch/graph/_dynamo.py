"""Frames that dynamo must skip, guards, and the user's code that the nodes of its graphs come from.

The frames are those of Amanda's own code, and of the routines of tools. A guard decides when dynamo has to
compile a graph for tools again, or to drop it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from amanda import interceptor
from amanda.graph import ValueHistory
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import GlobalStateSource
from torch._dynamo.types import ConvertFrameReturn

from .._compiled_callables import instruments_compiled_code
from .._modules import strip_wrappers_by_stack

if TYPE_CHECKING:
    from torch.fx import Node

    from ._ops import GraphProgram

_SKIP = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
"""Run the frame, and all that it calls, without dynamo."""

SKIP_ONCE = ConvertFrameReturn(_SKIP, apply_to_code=False)
"""Dynamo's result for a frame that runs without dynamo in this call alone."""

_FRAMEWORK = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_ROOT = re.compile(r"^[LG]\[[^\]]*\]\.?")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
# Since torch 2.14 a module that compiles itself is found by `__self__` of its call.
_CONTAINERS = {"_modules", "__self__", ""}


def skip_result(frame: Any) -> ConvertFrameReturn | None:
    """Return dynamo's result for a frame that it must not convert; None for other frames.

    Amanda's own code is skipped for good. Code that runs without tools is skipped once: a routine may be
    called elsewhere too.
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
    """Guard a graph by the identity of parameters with a source: another model gets a graph of its own."""
    for node in nodes:
        source = node._dynamo_source
        if source is not None:
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def guard_by_reads(program: GraphProgram, history: ValueHistory) -> None:
    """Guard the graph that dynamo compiles now by the values that its routines read: a change retraces it.

    Reads that no guard can watch are reported, and values that the routines have set are not watched.
    history: notes the reads, for later graphs of the code.
    """
    reads = program.reads
    reads.drop_changed_places()
    for entry in reads.unfollowed_entries(program.traced, "a compiled graph"):
        program.report(*entry)
    history.record(reads)
    # Weakly: dynamo keeps guards as long as the user's function, which must not keep the tools alive.
    reads_reference = ref(reads)

    def reads_hold(_: Any) -> bool:
        """Return True if all values that routines read are unchanged, or the graph runs without tools.

        False once the program is gone.
        """
        activation = interceptor.ACTIVATION.get(None)
        state = None if activation is None else activation.state
        if not (instruments_compiled_code(state) and state.enabled):
            return True  # the graph runs without tools here, so their values do not matter
        reads = reads_reference()
        return reads is not None and reads.are_unchanged()

    def guard(builder: Any, new_guard: Any) -> None:
        """Add `reads_hold` to the guards of the graph that dynamo compiles now."""
        explanation = ["what traceable routines of Amanda's tools read is as it was"]
        builder.guard_manager.root.add_lambda_guard(reads_hold, explanation, new_guard.user_stack)

    # A source that always exists: the guard looks at no value of the frame.
    install_guard(GlobalStateSource().make_guard(guard))


def guard_by_lifetime(owner: object) -> None:
    """Make dynamo drop the cache entry of the graph that it compiles now once another object is freed."""

    def guard(builder: Any, new_guard: Any) -> None:
        builder.id_ref(owner, "tools of a scope")

    install_guard(GlobalStateSource().make_guard(guard))


def user_line_of(node: Node) -> str:
    """Return the "file:line" of the user's code that leads to a node; "" if it is unknown."""
    # dynamo stores the stack as text; the last frame that is not torch's or Amanda's is the user's.
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    user_frames = [f"{file}:{line}" for file, line in frames if not file.startswith(_FRAMEWORK)]
    return user_frames[-1] if user_frames else ""


def module_path_of(node: Node, prefix: str = "") -> str:
    """Return the path, from the outermost module, of the module whose call made a node: "layer1.0.conv1".

    prefix: path of the module whose code the graph is of.
    """
    # The stack lists the enclosing modules from the outermost on, with full paths.
    module_stack = (node.meta.get("nn_module_stack") or {}).values()
    calls = [(_dotted_path(path), module_class) for path, module_class in module_stack]
    if not calls:
        return prefix
    innermost_path, _ = calls[-1]
    path = strip_wrappers_by_stack(innermost_path, calls)
    return ".".join(part for part in (prefix, path) if part)


def _dotted_path(path: str) -> str:
    """Return a path of dynamo's as `named_modules` spells it: "layers.0" for "L['self'].layers['0']"."""
    dotted = _ITEM.sub(r".\1", _ROOT.sub("", path))
    return ".".join(part for part in dotted.split(".") if part not in _CONTAINERS)
