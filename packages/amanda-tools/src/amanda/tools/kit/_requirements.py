"""Undocumented names of frameworks that tools lean on, and the check that they are there."""

from __future__ import annotations

import sys
from functools import cache

from amanda.backend import lacking
from amanda.errors import ToolError

_MEMORY = ("torch:UntypedStorage._cdata",)
_WRAPPED = (
    "torch:_C._functorch.is_functorch_wrapped_tensor",
    "torch:_C._functorch.is_legacy_batchedtensor",
)
_RECORD = ("tensorflow.python.eager.record:record_operation",)

REQUIRED: dict[tuple[str, str], tuple[str, ...]] = {
    ("coverage", "torch"): ("torch:nn.Module._call_impl",),
    ("coverage", "keras"): ("keras.src.layers.layer:Layer._flatten_layers",),
    ("diff", "torch"): (
        "torch:_C._current_graph_task_id",
        "torch:ops.aten._to_copy.default._schema",
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch.utils._pytree:tree_map_only",
    ),
    ("flops", "torch"): (
        *_MEMORY,
        "torch:Tensor._nested_tensor_size",
        "torch:_C.DisableTorchFunction",
        "torch:_C.DisableTorchFunctionSubclass",
        "torch:_C._dispatch_has_kernel",
        "torch:ops.aten.add.Tensor._schema",
        "torch._subclasses.fake_tensor:FakeTensor",
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch.utils._python_dispatch:TorchDispatchMode",
        "torch.utils._python_dispatch:_disable_current_modes",
        "torch.utils._pytree:tree_leaves",
        "torch.utils._pytree:tree_map_only",
    ),
    ("kit", "jax"): ("jax._src.core:eval_trace", "jax._src.core:set_current_trace"),
    ("kit", "mindspore"): ("mindspore.common._grad_function:_Function",),
    ("kit", "torch"): (*_MEMORY, *_WRAPPED, "torch:Tensor._base"),
    ("kit", "tensorflow"): (
        *_RECORD,
        "tensorflow.python.eager.record:stop_recording",
        "tensorflow.python.framework.ops:EagerTensor._datatype_enum",
        "tensorflow.python.framework.ops:EagerTensor._handle_data",
        "tensorflow.python.framework.ops:EagerTensor._numpy",
        "tensorflow.python.framework.ops:EagerTensor._numpy_internal",
        "tensorflow.python.ops.resource_variable_ops:ResourceVariable",
    ),
    ("nan", "torch"): (*_WRAPPED, "torch:Tensor._version"),
    ("partition", "torch"): (
        "torch:Tensor._version",
        "torch:_C._current_graph_task_id",
        "torch:autograd.Variable._execution_engine.queue_callback",
    ),
    ("partition", "keras"): (
        "keras.src.ops.node:Node.input_tensors",
        "keras.src.ops.symbolic_arguments:SymbolicArguments.fill_in",
    ),
    ("partition", "tf_keras"): (
        "tf_keras.src.engine.node:Node.keras_inputs",
        "tf_keras.src.engine.node:Node.map_arguments",
    ),
    ("partition.pipeline", "torch"): (
        "torch.distributed.pipelining:Pipe._from_traced",
        "torch.distributed.pipelining:Pipe._trace_with_export",
        "torch.fx.graph:Graph._target_to_str",
        "torch.fx.graph:_Namespace",
        "torch:ops.aten.add.Tensor._schema",
        "torch.distributed.pipelining._IR:aten_pipe_split_alias",
    ),
    ("patch", "torch"): ("torch._dynamo.eval_frame:skip_code",),
    ("profile", "torch"): (
        *_MEMORY,
        "torch:_C.DisableTorchFunction",
        "torch:_C._autograd._top_saved_tensors_default_hooks",
        "torch:_C._functions.AccumulateGrad._sequence_nr",
        "torch:autograd._get_sequence_nr",
        "torch:autograd._profiler_enabled",
        "torch:ops.profiler._record_function_enter_new",
        "torch:ops.profiler._record_function_exit._RecordFunction",
    ),
    ("quantize", "torch"): ("torch:_C._are_functorch_transforms_active",),
    ("quantize.weights", "torch"): ("torch:ops.aten._convert_weight_to_int4pack_for_cpu",),
    ("quantize", "tensorflow"): (*_RECORD, "tensorflow.python.framework.op_def_registry:get"),
    ("quantize.tflite", "tensorflow"): (
        "tensorflow.lite.python.lite:TFLiteConverterV2.from_concrete_functions",
        "tensorflow.lite.python.schema_py_generated:ModelT.InitFromPackedBuf",
        "tensorflow.python.framework.convert_to_constants:convert_variables_to_constants_v2",
    ),
    ("remat", "torch"): (
        *_MEMORY,
        "torch:Tensor._version",
        "torch:_C.DisableTorchFunction",
        "torch:_C._autograd._saved_tensors_hooks_is_enabled",
        "torch:_C._autograd._top_saved_tensors_default_hooks",
        "torch:_C._get_function_stack_at",
        "torch:_C._is_any_autocast_enabled",
        "torch:_C._len_torch_dispatch_stack",
        "torch:_C._len_torch_function_stack",
        "torch:_C._storage_Use_Count",
        "torch.autograd.forward_ad:_current_level",
        "torch:ops.aten.add.Tensor._schema",
        "torch.utils._python_dispatch:_disable_current_modes",
    ),
    ("search", "jax"): (
        "jax._src.core:set_current_trace",
        "jax._src.core:trace_ctx.trace",
        "jax._src.interpreters.batching:BatchTrace",
        "jax._src.lax.control_flow.conditionals:_cond_jvp",
        "jax._src.lax.control_flow.conditionals:_cond_linearize",
    ),
    ("search", "torch"): tuple(f"torch:nn.Conv{axes}d._conv_forward" for axes in (1, 2, 3)),
    ("sentinel", "torch"): (
        "torch:Tensor._base",
        "torch:Tensor._is_view",
        "torch:_C.DisableTorchFunction",
        "torch:_C._autograd._saved_tensors_hooks_is_enabled",
        "torch:_C._current_autograd_node",
        "torch:_C._len_torch_dispatch_stack",
        "torch.utils._python_dispatch:_disable_current_modes",
    ),
    ("rewrite", "torch"): (
        *_MEMORY,
        "torch:Tensor._backward_hooks",
        "torch:Tensor._make_wrapper_subclass",
        "torch:Tensor._version",
        "torch:_C._ForceDispatchKeyGuard",
        "torch:_C._disabled_torch_function_impl",
        "torch:_C._dispatch_tls_local_exclude_set",
        "torch:_C._dispatch_tls_local_include_set",
    ),
    ("trace", "torch"): (
        *_MEMORY,
        "torch:Tensor._version",
        "torch:_C._current_autograd_node",
        "torch:_C._current_graph_task_id",
        "torch:_C._functions.AccumulateGrad._sequence_nr",
        "torch:autograd._get_sequence_nr",
    ),
}  # fmt: skip
"""For a tool, or the kit, and a framework: module and attribute."""


@cache
def check(tool: str, framework: str) -> None:
    """Raise ToolError, which names what is missing, where a framework lacks what a tool leans on."""
    absent = [name.replace(":", ".") for name in lacking(REQUIRED[tool, framework])]
    if absent:
        version = getattr(sys.modules.get(framework), "__version__", "of an unknown version")
        raise ToolError(
            f"{framework} {version} lacks {', '.join(absent)}, which amanda.tools.{tool} leans on; "
            f"install another version of {framework}, or a newer amanda-tools"
        )
