"""The phase of an op, by the frames of Python that call it: construction, forward, backward or optimizer."""

from __future__ import annotations

import sys
from functools import lru_cache
from types import FrameType
from typing import Any, Literal

from amanda import OpContext

# By name, since no framework says that a model is being made.
_CONSTRUCTOR_NAMES = frozenset(
    {"__init__", "build", "build_from_config", "initialize_parameters", "reset_parameters",
     "_reset_parameters", "reset_running_stats", "init_weights", "_init_weights"}
)  # fmt: skip
_LAYER_CALLS = frozenset(
    {("_call_impl", "torch.nn.modules.module"),
     ("__call__", "keras.src.layers.layer"), ("__call__", "tf_keras.src.engine.base_layer")}
)  # fmt: skip
_LAYER_CLASSES = frozenset(
    {("torch.nn.modules.module", "Module"), ("keras.src.layers.layer", "Layer"),
     ("tf_keras.src.engine.base_layer", "Layer")}
)  # fmt: skip
_NAMES_WITH_PHASE = _CONSTRUCTOR_NAMES | {name for name, _ in _LAYER_CALLS}
_INITIALIZER_MODULES = ("torch.nn.init", "keras.src.initializers", "tf_keras.src.initializers")
_NO_TASK = -1
"""Number of autograd's task on a thread without a backward pass."""


def phase_of_frame(frame: FrameType) -> Literal["construction", "call"] | None:
    """Return "construction" or "call" by what a frame says of the ops below it; None if it says neither."""
    function = frame.f_code.co_name
    if function in _CONSTRUCTOR_NAMES and _is_layer_method(frame):
        return "construction"
    module = frame.f_globals.get("__name__")
    if (function, module) in _LAYER_CALLS:
        return "call"
    return "construction" if isinstance(module, str) and module.startswith(_INITIALIZER_MODULES) else None


def in_construction() -> bool:
    """Return True if the innermost frame with a phase constructs a model; False if no frame has a phase."""
    # From the inside out: a layer that is built as it is first called makes a model.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        phase = phase_of_frame(frame)
        if phase is not None:
            return phase == "construction"
        frame = frame.f_back
    return False


def _is_layer_method(frame: FrameType) -> bool:
    """Return True for a method of a module of PyTorch, or of a layer of Keras."""
    code = frame.f_code
    if not code.co_argcount:
        return False
    # Classes are compared by name, so that no framework is imported for the question.
    owner_class = type(frame.f_locals.get(code.co_varnames[0]))
    return any((base.__module__, base.__qualname__) in _LAYER_CLASSES for base in owner_class.__mro__)


def phase_in_torch(context: OpContext) -> str:
    """Return "backward", "optimizer", "construction" or "forward", by the innermost frame with a phase."""
    frame: Any = sys._getframe(1)
    if _in_backward_pass(frame):
        return "backward"
    has_user_frame = False
    while frame is not None:
        owner = _owner_of_module(str(frame.f_globals.get("__name__")))
        # Each op's first execution walks the frames: `phase_of_frame` is asked only where it may answer.
        if owner == "initializers" or frame.f_code.co_name in _NAMES_WITH_PHASE:
            phase = phase_of_frame(frame)
            if phase is not None:
                return "forward" if phase == "call" else phase
        if owner == "optimizer":
            return "forward" if has_user_frame and _is_differentiated(context) else "optimizer"
        # A frame of the user inside the optimizer's is the closure of `step`.
        has_user_frame = has_user_frame or owner == "user"
        frame = frame.f_back
    return "forward"


@lru_cache(maxsize=4096)
def _owner_of_module(module: str) -> Literal["initializers", "optimizer", "framework", "user"]:
    if module.startswith(_INITIALIZER_MODULES):
        return "initializers"
    if module.startswith("torch.optim."):
        return "optimizer"
    return "framework" if module.startswith(("torch.", "amanda.")) else "user"


def _in_backward_pass(frame: Any) -> bool:
    """Return True for an op that a Function's backward or a hook calls, not one that is recomputed."""
    import torch

    # The engine runs no task on this thread: the quick answer for nearly all ops.
    if torch._C._current_graph_task_id() == _NO_TASK:
        return False
    code_of_user_backward = torch.autograd.function.BackwardCFunction.apply.__code__
    while frame is not None and frame.f_code is not code_of_user_backward:
        name = frame.f_globals.get("__name__")
        # A checkpoint runs the forward pass again, from within the backward one.
        if name == "torch.utils.checkpoint":
            return False
        if name == "torch.autograd.graph" and frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return True


def _is_differentiated(context: OpContext) -> bool:
    """Return True if autograd records the op, as in the closure of an optimizer's step."""
    import torch

    inputs_as_lists = [value if isinstance(value, list) else [value] for value in context.get_inputs()]
    need_gradients = (
        getattr(value, "requires_grad", False) for values in inputs_as_lists for value in values
    )
    return torch.is_grad_enabled() and any(need_gradients)
