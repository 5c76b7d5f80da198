"""Patches of torch where it leaves the calling thread or code: checkpoints, futures, compiled callables.

Operators of Tensor are patched too: torch's wrapper of them turns any TypeError into NotImplemented.
"""

import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.utils.checkpoint
from amanda import interceptor
from amanda.backend import (
    Patches,
    Recomputation,
    bind_to_current_place,
    hide_ops,
    recomputable,
    report_unseen,
)
from amanda.scope import in_force

from ._autograd import activation_of_pass_caller
from ._collectives import patch_reducers_to_report
from ._compiled_callables import (
    GRAPHS_UNSUPPORTED,
    dynamo_has_stances,
    instruments_compiled_code,
    report_op_by_op,
)
from ._control_flow import run_control_flow_op_by_op
from ._modules import call_within
from ._requirements import CHECKPOINT_GENERATOR, log_once, torch_attribute, warn_of_absent_name

if TYPE_CHECKING:
    from ._driver import TorchDriver

LOADER_MODULE = "torch.utils.data.dataloader"
CONST_FOLD_MODULE = "torch.fx.experimental.const_fold"
RECORDED_TANGENTS = "its tangents are a recorded program, of ATen's operators"
UNSEEN_IN_WORKERS = (
    "their ops are not seen: they run in processes without the scope; num_workers=0 shows them"
)
_RESET_OF_LOADER = "_MultiProcessingDataLoaderIter._reset"
COMPOSABLE_MODULE = "torch.distributed._composable.checkpoint_activation"
COMPOSABLE_FILE = str(
    Path(torch.__file__).parent.joinpath(*COMPOSABLE_MODULE.split(".")[1:]).with_suffix(".py")
)

INTERNAL_FUNCTIONS = {
    ("torch.export._trace", "_export"): ("torch.export", "the ops are recorded as they are"),
    ("torch.cuda.graphs", "CUDAGraph.replay"): (
        "replays of CUDA graphs",
        "what a graph recorded runs as it is",
    ),
    ("torch._subclasses.meta_utils", "MetaConverter.__call__"): None,
    ("torch._subclasses.fake_tensor", "FakeTensorMode.__torch_dispatch__"): None,
    ("torch._library.utils", "Kernel.__call__"): None,  # what a program registers by `register_fake`
    # By which make_fx records an op, on fake tensors.
    ("torch.fx.experimental.proxy_tensor", "ProxyTorchDispatchMode.__torch_dispatch__"): None,
    ("torch", "_as_tensor_fullprec"): None,  # by which compiled code is given a number
    ("torch.utils.checkpoint", "_detach_helper"): None,  # by which selective checkpoints keep what ops made
    # A distributed tensor's op is tried out on fake tensors, to know the shapes of what it gives.
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_non_cached"): None,
}
"""Functions of torch whose ops are not the user's, with the report's entry for those that run a program."""


class TorchPatches:
    """Patches of torch that hold until the driver's attributes are restored.

    stance: dynamo's stance that the driver has set.  stance_before: the user's stance before.
    """

    stance: ClassVar[Any] = None
    stance_before: ClassVar[Any] = None

    def __init__(self, driver: "TorchDriver") -> None:
        self._driver = driver
        self._operator_code = OperatorCode()

    def install(self, patches: Patches) -> None:
        """Patch torch, and modules of it that are not imported yet at their import."""
        patches.on_restore(self._operator_code.restore)
        self._operator_code.exchange()
        self._patch_checkpoints(patches)
        self._patch_futures(patches)
        patch_reducers_to_report(patches)
        for module, name in INTERNAL_FUNCTIONS:
            patches.when_imported(
                module, functools.partial(_patch_to_run_uninstrumented, patches, module, name)
            )
        patches.when_imported(LOADER_MODULE, lambda: _patch_loader_to_report_workers(patches))
        patches.when_imported(CONST_FOLD_MODULE, lambda: _patch_linearize_to_report_tangents(patches))
        run_control_flow_op_by_op(patches)
        # Compiled callables run their Python code: dynamo's stance, as soon as there is a dynamo.
        patches.when_imported("torch._dynamo", lambda: self._set_stance(patches))

    @staticmethod
    def _patch_checkpoints(patches: Patches) -> None:
        """Make checkpoints recompute at the place of the first run, so that recomputed ops have its ids.

        What their hooks compute is hidden from tools.
        """
        checkpoint = torch.utils.checkpoint
        generator = getattr(checkpoint, CHECKPOINT_GENERATOR, None)
        if generator is not None:
            wrapped_generator = _wrap_checkpoint_generator(generator)
            patches.set(checkpoint, CHECKPOINT_GENERATOR, wrapped_generator)
            patches.when_imported(
                COMPOSABLE_MODULE, lambda: _patch_composable_checkpoint(patches, wrapped_generator)
            )
        forward = torch_attribute("utils.checkpoint.CheckpointFunction.forward")  # of reentrant checkpoints
        if forward is not None:
            patches.set(checkpoint.CheckpointFunction, "forward", _wrap_checkpoint_forward(forward))
        make_hook = torch_attribute("utils.checkpoint._recomputation_hook.__init__")
        if make_hook is not None:
            patches.set(checkpoint._recomputation_hook, "__init__", _wrap_hook_constructor(make_hook))

    @staticmethod
    def _patch_futures(patches: Patches) -> None:
        """Make callbacks of futures run in the scope that added them, on whichever thread."""
        for name in ("then", "add_done_callback"):
            original = torch_attribute(f"_C.Future.{name}")
            if original is not None:
                patches.set(torch._C.Future, name, _wrap_future_method(original))

    @classmethod
    def leaves_stance_to_scopes(cls, stance: Any) -> bool:
        """Return True if the user has set no stance but to compile: scopes then decide how code runs."""
        # The scope's own stance hides the user's: what counts is the stance from before.
        if stance is cls.stance:
            return getattr(cls.stance_before, "stance", "default") != "force_eager"
        return stance.stance == "default" and stance.backend is None

    @staticmethod
    def _set_stance(patches: Patches) -> None:
        """Set dynamo's stance to eager, so that compiled callables run their Python code in scopes.

        A dynamo without stances is patched instead.  The class holds the stance, and the user's from before.
        """
        if not dynamo_has_stances():
            _keep_old_dynamo_from_compiling(patches)
            return
        stance_contexts: list[Any] = []  # empty until the stance is set
        # First, since an interrupt may come at any call.
        patches.on_restore(lambda: _restore_stance(stance_contexts))
        stance_contexts.append(torch.compiler.set_stance("force_eager"))
        TorchPatches.stance_before = getattr(stance_contexts[0], "prev", None)
        TorchPatches.stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)


def _wrap_checkpoint_generator(generator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's generator of a checkpoint, to recompute at the place of the first run in scopes."""

    @functools.wraps(generator)
    def generate(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, Any, Any]:
        """Run a checkpoint, in scopes so that its function recomputes at the place of the first run."""
        if interceptor.active() is None or not torch.is_grad_enabled():
            return (yield from generator(fn, *args, **kwargs))
        # The generator surrounds the first run, and calls the function to recompute alone.
        recomputation = Recomputation()
        recompute = _in_scope_of_pass(functools.partial(recomputation.rerun, fn))
        with recomputation.first_run():
            return (yield from generator(recompute, *args, **kwargs))

    return generate


def _patch_composable_checkpoint(patches: Patches, wrapped_generator: Any) -> None:
    """Make a module that `torch.distributed._composable.checkpoint` has marked recompute within its call.

    Warns if that function runs checkpoints otherwise.
    wrapped_generator: the driver's wrapper of torch's generator; a module that has imported this wrapper gets
    torch's generator back first.
    """
    module: Any = sys.modules[COMPOSABLE_MODULE]
    generator = getattr(module, CHECKPOINT_GENERATOR, None)
    if generator is None:
        warn_of_absent_name(
            f"{COMPOSABLE_MODULE.removeprefix('torch.')}.{CHECKPOINT_GENERATOR}",
            "ops that composable checkpoints recompute have ids of their own",
        )
        return
    if generator is wrapped_generator:  # imported in this scope, whose end the module outlives
        generator = wrapped_generator.__wrapped__
        setattr(module, CHECKPOINT_GENERATOR, generator)

    @functools.wraps(generator)
    def generate(fn: torch.nn.Module, *args: Any, **kwargs: Any) -> Generator[None, Any, Any]:
        # The checkpoint begins within the call of the module, so its place is in that call already.
        run_generator = getattr(torch.utils.checkpoint, CHECKPOINT_GENERATOR)
        return run_generator(functools.partial(call_within, fn), *args, **kwargs)  # type: ignore[no-any-return]

    patches.set(module, CHECKPOINT_GENERATOR, generate)


def _wrap_checkpoint_forward(forward: Callable[..., Any]) -> Any:
    """Wrap the forward pass of a reentrant checkpoint, to recompute at the place of the first run."""

    @functools.wraps(forward)
    def run_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _in_scope_of_pass(recomputable(run_function)), *args)

    return staticmethod(run_forward)


def _wrap_hook_constructor(make_hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the constructor of a checkpoint's hooks: what they compute is not an op of the program."""

    @functools.wraps(make_hook)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make_hook(self, *args, **kwargs)
        self.pack_hook = _without_tools(self.pack_hook)

    return init


def _in_scope_of_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to run in the scope of its backward pass, also on threads of autograd's engine."""

    @functools.wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        caller_activation = activation_of_pass_caller()
        with nullcontext() if caller_activation is None else in_force(caller_activation):
            return function(*args, **kwargs)

    return run


def _without_tools(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an internal function of torch, whose ops are not the user's, to run without tools."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with interceptor.Suspension():
            return function(*args, **kwargs)

    return run


def _restore_stance(stance_contexts: Sequence[Any]) -> None:
    """Restore the stance from before, unless the program has set another stance meanwhile.

    stance_contexts: torch's context of the driver's stance; empty if an interrupt came before it was set.
    """
    current_stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    if stance_contexts and current_stance is TorchPatches.stance:
        stance_contexts[0].__exit__(None, None, None)


def _keep_old_dynamo_from_compiling(patches: Patches) -> None:
    """Keep a dynamo without stances from compiling in a scope, and from running compiled code.

    Logs a warning, and changes nothing, if dynamo lacks the functions to patch.
    """
    module = sys.modules.get("torch._dynamo.eval_frame")
    # Versions of dynamo have one function or both, by which they set the callback that compiles frames.
    setter_names = [name for name in ("set_eval_frame", "_maybe_set_eval_frame") if hasattr(module, name)]
    skip_code = getattr(module, "skip_code", None)
    if not setter_names or skip_code is None:
        log_once(logging.WARNING, f"torch {torch.__version__}: compiled callables are not seen")
        return
    original = getattr(module, setter_names[0])

    def set_eval_frame(callback: Any) -> Any:
        """Set dynamo's callback, which in scopes stays off, with a report; return the callback before."""
        callback_before = original(None)  # off: nothing that the frame calls is compiled
        activation = interceptor.active()
        if activation is None or not callable(callback):
            original(callback)
        else:
            if instruments_compiled_code(activation.state):
                activation.state.report(
                    f"graphs of torch.compile with torch {torch.__version__}", GRAPHS_UNSUPPORTED
                )
            report_op_by_op(activation.state, sys._getframe(1))
        return callback_before

    skip_code(set_eval_frame.__code__)  # dynamo must not compile its own switch
    for name in setter_names:
        patches.set(module, name, set_eval_frame)


def forget_torch_callables() -> None:
    """Clear dynamo's list of torch's callables, which may hold callables that the driver had replaced."""
    clear_list = getattr(sys.modules.get("torch._dynamo.trace_rules"), "clear_lru_cache", None)
    if clear_list is not None:
        clear_list()


def _patch_to_run_uninstrumented(patches: Patches, module: str, name: str) -> None:
    """Patch an internal function of torch to run without tools, and to report if it runs a program.

    Does nothing if this torch lacks the function.
    """
    *class_names, function_name = name.split(".")
    holder: Any = sys.modules[module]
    for class_name in class_names:
        holder = getattr(holder, class_name, None)
    function = getattr(holder, function_name, None)
    if function is None:
        return
    report_entry = INTERNAL_FUNCTIONS[module, name]
    patches.set(holder, function_name, hide_ops(function, lambda *args, **kwargs: report_entry))


def _patch_loader_to_report_workers(patches: Patches) -> None:
    """Patch DataLoader to report a pass whose ops run in worker processes; do nothing if torch lacks it."""
    reset = torch_attribute(f"utils.data.dataloader.{_RESET_OF_LOADER}")
    if reset is None:
        return

    @functools.wraps(reset)
    def report_and_reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
        report_unseen("worker processes of a DataLoader", UNSEEN_IN_WORKERS)
        return reset(iterator, *args, **kwargs)

    iterator_class = sys.modules[LOADER_MODULE]._MultiProcessingDataLoaderIter
    patches.set(iterator_class, "_reset", report_and_reset)


def _patch_linearize_to_report_tangents(patches: Patches) -> None:
    """Make `torch.func.linearize` report the ops of the program that it records to compute tangents."""
    # The function that makes the module cannot be replaced: dynamo recognises torch's functions alone.
    module_class = sys.modules[CONST_FOLD_MODULE].FoldedGraphModule
    original = module_class.__init__

    @functools.wraps(original)
    def make_and_report(self: Any, *args: Any, **kwargs: Any) -> None:
        """Make the folded module; if `linearize` makes it in a scope, report the ops of its graph."""
        original(self, *args, **kwargs)
        if interceptor.active() is not None and _is_called_by_transform("linearize"):
            op_counts = Counter(
                node.target.overloadpacket.__name__
                for node in self.graph.nodes
                if isinstance(node.target, torch._ops.OpOverload)
            )
            names = ", ".join(f"{count} {name}" for name, count in sorted(op_counts.items()))
            report_unseen("torch.func.linearize", f"{RECORDED_TANGENTS}: {names}")

    patches.set(module_class, "__init__", make_and_report)


def _is_called_by_transform(transform_name: str) -> bool:
    """Return True if the function of torch.func with this name is among the nearest callers."""
    frame: FrameType | None = sys._getframe(2)  # what called the caller of this function
    for _ in range(_CALLS_BETWEEN):
        if frame is None:
            return False
        is_in_functorch = frame.f_globals.get("__name__", "").startswith("torch._functorch")
        if frame.f_code.co_name == transform_name and is_in_functorch:
            return True
        frame = frame.f_back
    return False


_CALLS_BETWEEN = 8
"""Calls at most from `linearize` to the module that it makes: dynamo puts some around it."""


def _wrap_future_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of Future that takes a callback: the callback runs in the scope of this call."""

    @functools.wraps(original)
    def method(future: Any, callback: Callable[..., Any]) -> Any:
        return original(future, bind_to_current_place(callback))

    return method


def _wrap_operator(f: Any, wrapped: Any = None) -> FunctionType:
    """Wrap a method `f` of Tensor as torch does, but let the TypeErrors of tools through.

    Torch's functions get the code of this wrapper. So its free variables and globals have torch's names, and
    torch's module provides the globals.
    """

    def operator(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            operands = self, *args
            if has_torch_function(operands):  # type: ignore[name-defined] # noqa: F821
                return handle_torch_function(wrapped, operands, self, *args, **kwargs)  # type: ignore[name-defined] # noqa: F821
            return f(self, *args, **kwargs)
        except TypeError as error:
            # Imported here: the code runs with torch's globals, which lack Amanda's names.
            from amanda.interceptor import failure

            if failure() is error:
                raise
            return NotImplemented

    return operator  # type: ignore[return-value]


class OperatorCode:
    """Exchange of the code of torch's operators, so that exceptions of tools pass through.

    The operators stay the function objects that they are: programs may hold references to them.
    """

    def __init__(self) -> None:
        self._changed_operators: list[tuple[FunctionType, CodeType]] = []

    def exchange(self) -> None:
        """Exchange the code; do nothing if this torch wraps its operators in another way."""
        # Code can be exchanged only between functions with the same free variables. If torch's wrapper has
        # others, or another name, it is not the wrapper that this code was copied from.
        code = _wrap_operator(None).__code__
        torch_code = getattr(torch_attribute("Tensor.__rsub__"), "__code__", code)
        if (torch_code.co_freevars, torch_code.co_name) != (code.co_freevars, "wrapped"):
            return
        for operator in vars(torch.Tensor).values():
            if isinstance(operator, FunctionType) and operator.__code__ is torch_code:
                self._changed_operators.append((operator, torch_code))
                operator.__code__ = code.replace(co_name=torch_code.co_name)

    def restore(self) -> None:
        """Put torch's code back."""
        while self._changed_operators:
            operator, code = self._changed_operators.pop()
            operator.__code__ = code
