"""Undocumented names of torch that the driver needs, and the consequence if one is absent."""

import importlib
import logging
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.utils.checkpoint

from ._targets import missing_paths

logger = logging.getLogger("amanda")

# Every private name that the driver reads is listed here, which a test checks: so a torch that lacks a name
# is refused, or served with less, when the first scope opens, and not by an AttributeError at some op.
NEWEST_TESTED = "2.15"

ESSENTIAL = (
    "_C.DisableTorchFunction.__exit__",
    "_C.DisableTorchFunctionSubclass",
    "_C.ScriptFunction.__call__",
    "_C.ScriptMethod.__call__",
    "_C._EnableTorchFunction",
    "_C._are_functorch_transforms_active",
    "_C._autograd._pop_saved_tensors_default_hooks",
    "_C._autograd._push_saved_tensors_default_hooks",
    "_C._autograd._saved_tensors_hooks_is_enabled",
    "_C.DispatchKey.FuncTorchBatched",
    "_C._disabled_torch_function_impl",
    "_C._dispatch_tls_is_dispatch_key_excluded",
    "_C._functions.AccumulateGrad",
    "_C._functorch.TransformType.Functionalize",
    "_C._functorch._add_batch_dim",
    "_C._functorch.get_interpreter_stack",
    "_C._functorch.get_unwrapped",
    "_C._functorch.is_batchedtensor",
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._functorch.maybe_get_bdim",
    "_C._functorch.maybe_get_level",
    "_C._functorch.peek_interpreter_stack",
    "_C._functorch.pop_dynamic_layer_stack",
    "_C._functorch.push_dynamic_layer_stack",
    "_C._get_tracing_state",
    "_C._is_alias_of",
    "_C._is_torch_function_enabled",
    "_C._jit_get_schemas_for_operator",
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "_C._pop_torch_function_stack",
    "_C._push_on_torch_function_stack",
    "_C._set_grad_enabled",
    "_C._storage_Use_Count",
    "_C.parse_schema",
    "_functorch.autograd_function.custom_function_call",
    "_is_functional_tensor",
    "_ops.OpOverload.__call__",
    "_ops.OpOverloadPacket.__call__",
    "_sync",
    "autograd._get_sequence_nr",
    "autograd.function._SingleLevelFunction",
    "autograd.graph._engine_run_backward",
    "nn.Module._call_impl",
    "nn.Module._wrapped_call_impl",
    "nn.modules._functions.BackwardHookFunction",
    "utils._device.DeviceContext",
    "utils._python_dispatch._disable_current_modes",
    "utils._python_dispatch._pop_mode",
    "utils._python_dispatch._push_mode",
    "utils._pytree.tree_flatten",
    "utils._pytree.tree_unflatten",
)
"""Without one of these nothing is instrumented."""

CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
"""Name of the function that runs a checkpoint; since torch 2.14 old callers alone use it without `_impl`."""
if hasattr(torch.utils.checkpoint, f"{CHECKPOINT_GENERATOR}_impl"):
    CHECKPOINT_GENERATOR += "_impl"

OPTIONAL = {
    "utils.data.dataloader._MultiProcessingDataLoaderIter._reset": "the report lacks ops of a DataLoader's "
    "worker processes",
    "_C._autograd._top_saved_tensors_default_hooks": "what in-place ops save of values that routines change "
    "does not go through hooks on saved tensors",
    "_C._autograd._unsafe_set_version_counter": "torch's error for a tensor that was written after an op in "
    "place on a view had saved it says less",
    "_C.Future.add_done_callback": "what follows a collective is done outside of the scope",
    "_C.Future.then": "what follows a collective is done outside of the scope",
    "_C._current_graph_task_id": "calls of kernels in Python and of modes in the backward pass "
    "are seen as ops, and tools that follow gradients cost more",
    "_C._get_obj_in_tls": "what autograd's threads recompute is not seen after the scope of the forward pass",
    "_C._is_key_in_tls": "what autograd's threads recompute is not seen after the scope of the forward pass",
    "_C._is_torch_function_all_disabled": "modes see what the program computes in DisableTorchFunction",
    "_C._parse_dispatch_key": "routines cost a multiple of the time",
    "autograd.function._HookMixin._register_hook": "routines of backward ops cost twice the time",
    "_guards.TracingContext.try_get": "graphs by dynamo record the ops of routines",
    "_subclasses.fake_tensor.FakeTensorMode.__torch_dispatch__": "ops within ops on fake tensors are seen",
    "_subclasses.meta_utils.MetaConverter.__call__": "ops that make fake tensors of real ones are seen",
    "fx.experimental.proxy_tensor.get_proxy_mode": "graphs by make_fx record the ops of routines",
    "jit._builtins._find_builtin": "without native code, TorchScript of a scope calls Python",
    f"utils.checkpoint.{CHECKPOINT_GENERATOR}": "recomputed ops have ids of their own",
    "utils.checkpoint.CheckpointFunction.forward": "recomputed ops have ids of their own",
    "utils.checkpoint._recomputation_hook.__init__": "tensors that checkpoints keep are seen as ops",
}
"""Consequences of the absence of names, which a warning states."""

FOR_GRAPHS = (
    "_C._dynamo.eval_frame._FrameAction.SKIP",
    "_C._dynamo.eval_frame._FrameExecStrategy",
    "_C._dynamo.eval_frame.set_eval_frame_isolate_recompiles_id",
    "_C._functorch.get_dynamic_layer_stack_depth",
    "_C._functorch.pop_dynamic_layer_stack_and_undo_to_depth",
    "_dynamo.config.patch",
    "_dynamo.config.recompile_limit",
    "_dynamo.convert_frame.CatchErrorsWrapper",
    "_dynamo.eval_frame._callback_from_stance",
    "_dynamo.eval_frame._debug_get_cache_entry_list",
    "_dynamo.eval_frame._stance",
    "_dynamo.external_utils",
    "_dynamo.guards.GuardBuilder.ID_MATCH",
    "_dynamo.guards.install_guard",
    "_dynamo.source.GlobalStateSource",
    "_dynamo.types.ConvertFrameReturn",
    "_higher_order_ops.effects._register_effectful_op",
    "_library.effects.EffectType.ORDERED",
    "_ops.HigherOrderOperator",
    "_subclasses.fake_tensor.FakeTensor",
    "_subclasses.fake_tensor.FakeTensorMode",
    "autograd.Variable._execution_engine.queue_callback",
    "utils._pytree.keystr",
    "utils._pytree.tree_flatten",
    "utils._pytree.tree_flatten_with_path",
    "utils._pytree.tree_map",
    "utils._pytree.tree_map_only",
    "utils.checkpoint._StopRecomputationError",
)
"""Without one of these compiled callables run op by op, also where a scope asks for their graphs."""


def torch_attribute(path: str) -> Any:
    """Return an attribute of torch by its path; None if this torch lacks the attribute."""
    try:
        return attrgetter(path)(torch)
    except AttributeError:
        return None


@cache
def missing_for_graphs() -> tuple[str, ...]:
    """Return the names that graphs are instrumented with and that this torch lacks; imports dynamo."""
    importlib.import_module("torch._dynamo")
    for path in FOR_GRAPHS:  # submodules are attributes of torch only once they are imported
        with suppress(ImportError):
            importlib.import_module(f"torch.{path.rpartition('.')[0]}")
    return tuple(path for path in FOR_GRAPHS if torch_attribute(path) is None)


def warn_of_absent_names() -> None:
    """Log a warning for each optional name, and each part of torch's API, that this torch lacks."""
    # Parts of torch's API differ between builds as well as versions: warn, and serve the rest.
    consequence_by_path = dict.fromkeys(missing_paths(), "its calls are not seen")
    consequence_by_path |= {
        path: consequence for path, consequence in OPTIONAL.items() if torch_attribute(path) is None
    }
    for path, consequence in consequence_by_path.items():
        warn_of_absent_name(path, consequence)


def warn_of_absent_name(path: str, consequence: str) -> None:
    """Log a warning, the first time, that this torch lacks a name; path: without `torch.`."""
    version_note = f"amanda-driver-torch was tested with torch up to {NEWEST_TESTED}"
    log_once(logging.WARNING, f"torch {torch.__version__} lacks {path}: {consequence}; {version_note}")


def count_private_names() -> int:
    """Return the number of undocumented names of the lists above that this torch has."""
    return sum(torch_attribute(path) is not None for path in (*ESSENTIAL, *OPTIONAL))


@cache
def log_once(level: int, message: str) -> None:
    """Log a message the first time; the driver attaches with every first scope."""
    logger.log(level, message)
