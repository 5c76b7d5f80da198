"""The driver of graph mode: in scopes that ask for it, torch.compile compiles instrumented graphs."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, ClassVar

import torch
from amanda import interceptor
from amanda.backend import Driver, hide_ops

from .._compiled_callables import (
    GRAPHS_UNSUPPORTED,
    dynamo_has_stances,
    instruments_compiled_code,
    report_op_by_op,
)
from .._control_flow import is_control_flow
from .._modules import plain_module_calls
from .._patches import TorchPatches
from .._requirements import missing_for_graphs

NEEDS_NATIVE = "compiled callables run op by op in scopes; `python -m amanda` says why there is none"


class GraphDriver(Driver):
    """The driver of PyTorch's graph mode."""

    api = 2
    framework = "torch"
    modes: ClassVar = ("graph",)
    namespace_tag = "pytorch"

    def attach(self) -> None:
        """Patch the place where dynamo chooses its callback, and the places where compiled code runs."""
        self.patches.when_imported("torch._dynamo.eval_frame", self._patch_callback_choice)
        self.patches.when_imported(_RUNTIME, self._hide_ops_of_compiled_code)

    def _patch_callback_choice(self) -> None:
        """Patch dynamo to choose a callback that instruments graphs in scopes that ask for it.

        Does nothing to a dynamo without stances, of which the driver of eager mode tells such scopes.
        """
        module = sys.modules["torch._dynamo.eval_frame"]
        if not dynamo_has_stances():
            return
        # Dynamo asks this function at each call of a compiled callable which callback its frames get.
        original = module._callback_from_stance

        @functools.wraps(original)
        def callback_from_stance(callback: Any) -> Any:
            """Return a callback that instruments graphs if a scope asks for it, else by dynamo's stance.

            For torch's control flow it is dynamo's own; where no tool is in force, module calls are torch's.
            """
            if callback is None or callback is False:
                return original(callback)
            activation = interceptor.active()
            if activation is None:
                return (
                    _PlainCallback(callback) if _runs_uninstrumented(module._stance) else original(callback)
                )
            caller = sys._getframe(1)  # dynamo's frame, which names the compiled callable
            if is_control_flow(caller.f_locals.get("fn")):
                return original(callback)  # bodies run op by op: torch compiles them for eager mode
            compiler_module = _compiler_module(activation.state)
            choose_by_stance = functools.partial(
                _callback_by_stance, original, activation.state, module, caller
            )
            if compiler_module is None:
                return choose_by_stance(callback)
            return compiler_module.choose_callback(callback, choose_by_stance)

        self.patches.set(module, "_callback_from_stance", callback_from_stance)

    def _hide_ops_of_compiled_code(self) -> None:
        """Patch AOTAutograd so that ops of compiled code, and of its compiler, do not reach eager mode."""
        module = sys.modules[_RUNTIME]
        for holder, name in (
            (module, "call_func_at_runtime_with_args"),
            (getattr(module, "_AutogradBackwardCompiler", None), "get_or_compile"),
        ):
            original = getattr(holder, name, None)
            if original is not None:
                # The ops of torch's compiler are not the user's.
                self.patches.set(holder, name, hide_ops(original))


def _compiler_module(state: Any) -> ModuleType | None:
    """Return the module that compiles instrumented graphs; None if it cannot be imported, or need not be yet.

    It is imported for the first scope that asks.  What this torch lacks for it is reported to such scopes.
    """
    if not interceptor.NATIVE:
        if instruments_compiled_code(state):
            state.report("graphs of torch.compile without the native interceptor", NEEDS_NATIVE)
        return None
    # Imported late: the module needs dynamo, and names of it that older versions of torch lack.
    module_name = f"{__package__}._compiler"
    if sys.modules.get(module_name) is None and not instruments_compiled_code(state):
        return None
    missing_names = missing_for_graphs()
    if not missing_names:
        try:
            return importlib.import_module(module_name)
        except (ImportError, AttributeError) as error:
            missing_names = (str(error),)
    if instruments_compiled_code(state):
        subject = f"graphs of torch.compile with torch {torch.__version__}"
        state.report(subject, f"{GRAPHS_UNSUPPORTED} ({', '.join(missing_names)})")
    return None


def _runs_uninstrumented(stance: Any) -> bool:
    """Return True if no scope is in force here, or its tools are disabled: compiled code runs as it is.

    False under a stance of the user's, and without the native interceptor: dynamo would see stand-ins.
    """
    if not interceptor.NATIVE:
        return False
    activation = interceptor.ACTIVATION.get(None)
    if activation is not None and activation.state.intercepts:
        return False  # a routine, or an op, runs
    return stance is TorchPatches.stance and TorchPatches.leaves_stance_to_scopes(stance)


class _PlainCallback:
    """Stand-in for dynamo's callback where no tool is in force, though a scope is open elsewhere."""

    def __init__(self, callback: Any) -> None:
        self._torchdynamo_orig_backend = callback

    def __call__(self, *args: Any) -> Any:
        with plain_module_calls():
            return self._torchdynamo_orig_backend(*args)


def _callback_by_stance(
    original: Callable[[Any], Any], state: Any, dynamo: ModuleType, caller: FrameType, callback: Any
) -> Any:
    """Return dynamo's callback for frames by its stance, the scope's or the user's; None to run op by op.

    Reports how compiled code runs.  original: dynamo's function, which looks at the stance alone.
    caller: dynamo's frame, which names the compiled callable.
    """
    frame_callback = original(callback)
    if frame_callback is None:
        if dynamo._stance is TorchPatches.stance and TorchPatches.leaves_stance_to_scopes(dynamo._stance):
            report_op_by_op(state, caller)
        return frame_callback
    stance = getattr(dynamo._stance, "stance", dynamo._stance)
    if not interceptor.NATIVE:  # dynamo would trace through what stands in for torch's functions
        state.report("compiled code", f"it runs op by op, though torch.compiler's stance is {stance!r}")
        return None
    state.report("compiled code", f"it runs as it is while torch.compiler's stance is {stance!r}")
    if frame_callback is False:
        return frame_callback
    # Even under the user's stance dynamo must not compile Amanda's own frames.
    try:
        from ._dynamo import CallbackForUserFrames
    except ImportError:
        return frame_callback
    return CallbackForUserFrames(frame_callback)


_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"
