"""The driver itself: which calls it intercepts and how each reaches the core."""

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mindspore._c_expression as native
from amanda import interceptor
from amanda.backend import Call, Operation, State
from amanda.interceptor import IMPLEMENTATION, TRANSPARENT, Detour, Memo, Site
from mindspore import Parameter, Tensor
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as _executor

from ._autograd import Autograd, node_of
from ._calls import ApplyCall, AssignCall, KernelCall, MethodCall, MindSporeCall, OverloadCall, PrimitiveCall
from ._generic import Generic
from ._jit import report_compiled
from ._modules import cell_path, enclose_cells
from ._recompute import follow_recomputation
from ._targets import Target, targets
from ._tensors import memory_of
from ._views import MindSporeViews

_CALLS: dict[str, type[MindSporeCall]] = {
    "kernel": KernelCall,
    "overload": OverloadCall,
    "method": MethodCall,
    "assignment": AssignCall,
}
APPLY = "Function.apply"


class MindSporeDriver(Autograd):
    """MindSpore, PyNative mode."""

    api = 1
    framework = "mindspore"
    modes = ("eager",)
    identity_types = (Parameter,)

    def __init__(self) -> None:
        super().__init__()
        self.views = MindSporeViews()
        self._generic = Generic(self)
        self._recorded_later = False
        self._memories: dict[int, Callable[[], Any]] = {}

    def attach(self) -> None:
        """Place every site, enclose the calls of cells, and follow backward passes."""
        if interceptor.NATIVE:
            for site in self._sites:
                site.place()
        else:
            for site, target in self._sites.items():
                self.attributes.set(*_place_of(target), Detour(site))
        self.attributes.set(_Function, "apply", classmethod(Detour(self._apply)))
        self._generic.enter(self.attributes)
        enclose_cells(self.attributes)
        self.follow_backward(self.attributes)
        follow_recomputation(self.attributes)
        report_compiled(self.attributes)
        # Nodes are made on another thread otherwise, which may wait for Python while Python waits for a node.
        self._recorded_later = not _executor.disable_frontend_and_bprop_pipeline()

    def detach(self) -> None:
        """Leave MindSpore as it was."""
        if self._recorded_later:
            _executor.enable_frontend_and_bprop_pipeline()
            self._recorded_later = False
        super().detach()
        self._memories.clear()
        if interceptor.NATIVE:
            for site in self._sites:
                site.remove()

    @cached_property
    def _sites(self) -> dict[Site, Target]:
        return {self._site(target): target for target in targets()}

    def _site(self, target: Target) -> Site:
        name = target.operator
        # What native code does by a function in Python is how it does it, and no op beside.
        return self.site(target.callable, Operation(name), name, IMPLEMENTATION)

    @cached_property
    def _apply(self) -> Site:
        function = vars(_Function)["apply"].__func__
        return self.site(function, Operation(APPLY), APPLY, TRANSPARENT | IMPLEMENTATION)

    def handle(
        self,
        state: State,
        memo: Memo | None,
        op_id: int,
        site: Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: int = 0,
        done: tuple[Any, ...] | None = None,
    ) -> Any:
        """Bring a call to the core, but for functions of MindSpore's own that compute nothing."""
        if site is self._apply and args[0].__module__.startswith("mindspore."):
            return site.invoke(args, kwargs)
        return super().handle(state, memo, op_id, site, args, kwargs, key, done)

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its inputs in schema order."""
        if site is self._apply:
            return ApplyCall(site, args, kwargs)
        target = self._sites.get(site)
        return (PrimitiveCall if target is None else _CALLS[target.kind])(site, args, kwargs)

    def shown(self, values: list[Any]) -> list[Any]:
        """Return the values of an execution that is analysed, and note in which memory the parameters lie."""
        for value in values:
            if isinstance(value, Parameter):
                self._memories[memory_of(value)] = weakref.ref(value)
        return values

    def variable_of(self, value: Any) -> Any:
        """A parameter, or the one that a tensor is a view of; a leaf that needs a gradient, as itself."""
        if isinstance(value, Parameter) or not isinstance(value, Tensor):
            return value if isinstance(value, Parameter) else None
        found = self._memories.get(memory_of(value), _nothing)()
        if found is not None and memory_of(found) == memory_of(value):
            return found
        return value if value._is_leaf and node_of(value) is not None else None

    def part_of(self, value: Any, variable: Any) -> str:
        """Name the part of a parameter that a view of fewer elements is, by where it begins."""
        return f"@{value.storage_offset()}" if value.size < variable.size else ""

    def scope_name(self, subjects: Sequence[Any]) -> str:
        """Path of the calling cell in the network."""
        return cell_path(subjects)


def _place_of(target: Target) -> tuple[Any, str]:
    """Return where a detour is set: methods on the class in Python, as the native one cannot be changed."""
    return (Tensor, target.name) if target.holder is native.TensorPy else (target.holder, target.name)


def _nothing() -> None:
    return None
