"""The driver of graph mode: in scopes that ask for it, torch.compile compiles instrumented graphs."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from functools import cached_property
from types import FrameType, ModuleType
from typing import Any, ClassVar

import torch
from amanda import interceptor
from amanda.backend import Driver, Namespace

from .._asked import OP_BY_OP, asks_for_graphs, has_stances
from .._modules import plain_module_calls
from .._op_by_op import tell
from .._requirements import missing_for_graphs
from .._surroundings import Surroundings

FOLLOWED_NATIVELY = "compiled callables run op by op in scopes; `python -m amanda` says why there is none"


class GraphDriver(Driver):
    """PyTorch, graph mode."""

    api = 1
    framework = "torch"
    modes: ClassVar = ("graph",)

    @cached_property
    def namespace(self) -> Namespace:
        """`pytorch/<version>/graph`."""
        return Namespace(f"pytorch/{torch.__version__.split('+')[0]}/graph")

    def attach(self) -> None:
        """Stand where dynamo is asked for its callback, and where compiled code runs."""
        self.attributes.when_imported("torch._dynamo.eval_frame", self._follow_dynamo)
        self.attributes.when_imported(_RUNTIME, self._run_compiled_code_as_one)

    def _follow_dynamo(self) -> None:
        module = sys.modules["torch._dynamo.eval_frame"]
        if not has_stances():  # the driver of eager mode says so to scopes that ask for graphs
            return
        original = module._callback_from_stance

        @functools.wraps(original)
        def callback_from_stance(callback: Any) -> Any:
            if callback is None or callback is False:
                return original(callback)
            activation = interceptor.active()
            if activation is None:
                return _AsOutside(callback) if _is_outside(module._stance) else original(callback)
            compiler = _compiler(activation.state)
            caller = sys._getframe(1)
            otherwise = functools.partial(_by_stance, original, activation.state, module, caller)
            return otherwise(callback) if compiler is None else compiler.chosen(callback, otherwise)

        self.attributes.set(module, "_callback_from_stance", callback_from_stance)

    def _run_compiled_code_as_one(self) -> None:
        """Keep ops of compiled code, and of a compiler that a backward pass calls, from eager mode."""
        module = sys.modules[_RUNTIME]
        for holder, name in (
            (module, "call_func_at_runtime_with_args"),
            (getattr(module, "_AutogradBackwardCompiler", None), "get_or_compile"),
        ):
            original = getattr(holder, name, None)
            if original is not None:
                self.attributes.set(holder, name, _alone(original))


def _compiler(state: Any) -> ModuleType | None:
    """Return the compiler of instrumented graphs; None where no scope asked for them, or means lack."""
    if not interceptor.NATIVE:
        if asks_for_graphs(state):
            state.report("graphs of torch.compile without the native interceptor", FOLLOWED_NATIVELY)
        return None
    name = f"{__package__}._compiler"
    if sys.modules.get(name) is None and not asks_for_graphs(state):
        return None
    lacking = missing_for_graphs()
    if not lacking:
        try:
            return importlib.import_module(name)
        except (ImportError, AttributeError) as error:
            lacking = (str(error),)
    if asks_for_graphs(state):
        what = f"graphs of torch.compile with torch {torch.__version__}"
        state.report(what, f"{OP_BY_OP} ({', '.join(lacking)})")
    return None


def _is_outside(stance: Any) -> bool:
    """Return True if no scope is in force here, or its tools are disabled: compiled code runs as it is.

    Without the native interceptor dynamo would see stand-ins for torch's functions, so it does not.
    """
    if not interceptor.NATIVE:
        return False
    activation = interceptor.ACTIVATION.get(None)
    if activation is not None and activation.state.intercepts:
        return False  # a routine, or an op, runs
    return stance is Surroundings.stance and Surroundings.leaves_stance(stance)


class _AsOutside:
    """Stands in for a callback of dynamo's where no tool is in force, though a scope is open elsewhere."""

    def __init__(self, callback: Any) -> None:
        self._torchdynamo_orig_backend = callback

    def __call__(self, *args: Any) -> Any:
        with plain_module_calls():
            return self._torchdynamo_orig_backend(*args)


def _by_stance(
    original: Callable[[Any], Any], state: Any, dynamo: ModuleType, caller: FrameType, callback: Any
) -> Any:
    """Return what dynamo calls for frames by its stance: the scope's own, or one taken within the scope."""
    found = original(callback)
    if found is None:
        if dynamo._stance is Surroundings.stance and Surroundings.leaves_stance(dynamo._stance):
            tell(state, caller)
        return found
    stance = getattr(dynamo._stance, "stance", dynamo._stance)
    if not interceptor.NATIVE:  # dynamo would trace through what stands in for torch's functions
        state.report("compiled code", f"it runs op by op, though torch.compiler's stance is {stance!r}")
        return None
    state.report("compiled code", f"it runs as it is while torch.compiler's stance is {stance!r}")
    if found is False:
        return found
    try:
        from ._frames import Sparing
    except ImportError:
        return found
    return Sparing(found)


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with interceptor.Suspension():
            return function(*args, **kwargs)

    return alone


_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"
