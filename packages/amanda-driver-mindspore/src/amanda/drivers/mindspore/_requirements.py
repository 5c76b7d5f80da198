"""Private names of MindSpore that the driver needs."""

NEWEST_TESTED = "2.10"
_BY_MODULE = {
    "mindspore": "Tensor._grad_node Tensor._is_leaf Tensor._requires_grad Tensor._version",
    "mindspore._c_expression": "PyNativeExecutor_.real_run_op PyNativeExecutor_.run_op_async "
    "TensorPy.register_hook TensorPy.remove_hook run_backward",
    "mindspore.common._grad_function": "_Function.apply",
    "mindspore.common._tensor_cpp_method": "tensor_cpp_methods",
    "mindspore.common.recompute": "_RecomputeCell.bprop _RecomputeCell.construct recompute_without_reentrant",
    "mindspore.graph.api": "_JitExecutor.__call__ _PyNativeExecutor.end_graph _PyNativeExecutor.grad "
    "_PyNativeExecutor.real_run_op _PyNativeExecutor.run_op_async "
    "_pynative_executor.disable_frontend_and_bprop_pipeline _pynative_executor.enable_grad "
    "_pynative_executor.requires_grad _pynative_executor.set_enable_grad",
    "mindspore.nn": "Cell._complex_call Cell._run_construct Cell.compile_and_run",
}
PRIVATE_NAMES = tuple(f"{module}:{name}" for module, names in _BY_MODULE.items() for name in names.split())
"""Without one of these nothing is instrumented."""
