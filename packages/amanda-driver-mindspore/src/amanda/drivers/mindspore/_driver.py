"""The driver of MindSpore: the native operators that it intercepts, and their calls for the core."""

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mindspore
import mindspore._c_expression as native
from amanda import interceptor
from amanda.backend import Call, Operation, OpFacts, SelfTestProgram, State
from amanda.interceptor import IMPLEMENTATION, TRANSPARENT, CallCache, Detour, Resumption, Site
from mindspore import Parameter, Tensor
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as _executor

from ._autograd import MindSporeAutograd, node_of
from ._calls import (
    ApplyCall,
    AssignCall,
    KernelCall,
    MethodCall,
    MindSporeCall,
    NamedPrimitiveCall,
    OverloadCall,
)
from ._cells import cell_path, enclose_cells, patch_recomputation, report_compiled
from ._targets import NativeTarget, PrimitiveInterception, native_targets
from ._tensors import memory_of
from ._views import MindSporeViews

_CALLS: dict[str, type[MindSporeCall]] = {
    "kernel": KernelCall,
    "overload": OverloadCall,
    "method": MethodCall,
    "assignment": AssignCall,
}
APPLY = "Function.apply"
_NAMES_BY_MODULE = {
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
PRIVATE_NAMES = tuple(
    f"{module}:{name}" for module, names in _NAMES_BY_MODULE.items() for name in names.split()
)
"""Without one of these nothing is instrumented."""


class MindSporeDriver(MindSporeAutograd):
    """The driver of MindSpore in PyNative mode: an op is a call of a native operator."""

    api = 2
    framework = "mindspore"
    modes = ("eager",)
    newest_tested = "2.10"
    private_names = PRIVATE_NAMES
    identity_types = (Parameter,)

    def __init__(self) -> None:
        super().__init__()
        self.views = MindSporeViews()
        self._primitive_interception = PrimitiveInterception(self)
        self._has_stopped_pipeline = False
        # Weak references by address, since a view does not name the parameter that it shows.
        self._parameter_by_memory: dict[int, Callable[[], Any]] = {}

    def attach(self) -> None:
        """Intercept native operators, and patch the calls of cells, backward passes and recomputation.

        Until `detach` autograd nodes are created without MindSpore's pipeline.
        """
        if interceptor.NATIVE:
            self.patches.place_stubs(self._sites)
        else:
            for site, target in self._sites.items():
                self.patches.set(*_holder_and_name(target), Detour(site))
        self.patches.set(_Function, "apply", classmethod(Detour(self._apply_site)))
        self._primitive_interception.patch(self.patches)
        enclose_cells(self.patches)
        self.patch_backward(self.patches)
        patch_recomputation(self.patches)
        report_compiled(self.patches)
        # In the pipeline a thread creates the nodes, and may wait for the GIL while Python waits for it.
        self._has_stopped_pipeline = not _executor.disable_frontend_and_bprop_pipeline()

    def self_test_program(self) -> SelfTestProgram:
        """Return a program of one op, tanh, and its backward op."""
        return SelfTestProgram(_run_self_test, "tanh", "tanh")

    def detach(self) -> None:
        """Restore what `attach` has changed, and forget the parameters."""
        if self._has_stopped_pipeline:
            _executor.enable_frontend_and_bprop_pipeline()
            self._has_stopped_pipeline = False
        super().detach()
        self._parameter_by_memory.clear()

    @cached_property
    def _sites(self) -> dict[Site, NativeTarget]:
        return {self._site(target): target for target in native_targets()}

    def _site(self, target: NativeTarget) -> Site:
        """Return the site of a native operator."""
        name = target.operator
        # Native code may call Python functions as a part of the operator: their ops are not the program's.
        return self.site(target.callable, Operation(name), name, IMPLEMENTATION)

    @cached_property
    def _apply_site(self) -> Site:
        """The site of `Function.apply`, which calls functions with a custom backward."""
        function = vars(_Function)["apply"].__func__
        return self.site(function, Operation(APPLY), APPLY, TRANSPARENT | IMPLEMENTATION)

    def handle(
        self,
        state: State,
        call_cache: CallCache | None,
        op_id: int,
        site: Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: int = 0,
        resumption: Resumption | None = None,
    ) -> Any:
        """Bring a call to the core; functions of MindSpore itself that compute nothing run at once."""
        if site is self._apply_site and args[0].__module__.startswith("mindspore."):
            return site.invoke(args, kwargs)
        return super().handle(state, call_cache, op_id, site, args, kwargs, key, resumption)

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call with its inputs in schema order, of the class for its kind of target."""
        if site is self._apply_site:
            return ApplyCall(site, args, kwargs)
        target = self._sites.get(site)  # None for the sites of the executor's primitives
        return (NamedPrimitiveCall if target is None else _CALLS[target.kind])(site, args, kwargs)

    def unwrap_for_analysis(self, values: list[Any]) -> list[Any]:
        """Return the values, which have no boxes; record the memory of parameters among them for views."""
        for value in values:
            if isinstance(value, Parameter):
                self._parameter_by_memory[memory_of(value)] = weakref.ref(value)
        return values

    def _variable_of(self, value: Any) -> Any:
        """Return the parameter that a tensor is or shows, or a leaf that needs a gradient; else None."""
        if isinstance(value, Parameter):
            return value
        if not isinstance(value, Tensor):
            return None
        parameter = self._parameter_by_memory.get(memory_of(value), _no_parameter)()
        # The address may have been freed and used again.
        if parameter is not None and memory_of(parameter) == memory_of(value):
            return parameter
        return value if value._is_leaf and node_of(value) is not None else None

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of a call's op, with the calling cell and the parameters that the op reads."""
        facts = super().describe(call, subjects)
        facts.scope = cell_path(subjects)
        facts.variable_of, facts.part_of = self._variable_of, _part_of
        return facts


def _part_of(value: Any, variable: Any) -> str:
    """Name the part of a parameter that a smaller view shows, by its offset; "" for the whole."""
    return f"@{value.storage_offset()}" if value.size < variable.size else ""


def _holder_and_name(target: NativeTarget) -> tuple[Any, str]:
    """Return holder and name of a target; for methods the Python class, since the native one is immutable."""
    return (Tensor, target.name) if target.holder is native.TensorPy else (target.holder, target.name)


def _no_parameter() -> None:
    return None


def _run_self_test() -> list[float]:
    """Compute tanh and its gradient; return their numbers."""
    value, gradient = mindspore.value_and_grad(mindspore.ops.tanh)(Tensor([0.5, -0.25], mindspore.float32))
    return [*value.asnumpy().tolist(), *gradient.asnumpy().tolist()]
