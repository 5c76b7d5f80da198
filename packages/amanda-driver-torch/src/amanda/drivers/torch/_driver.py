"""The driver of PyTorch's eager mode: which calls it intercepts, and how each call reaches the core."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from amanda import interceptor
from amanda.backend import Call, EagerDriver, OpFacts, SelfTestProgram, State, digest
from amanda.interceptor import (
    IMPLEMENTATION,
    ONE_PLACE,
    TRANSPARENT,
    CallCache,
    Detour,
    Reader,
    Resumption,
    Site,
)
from amanda.plan import spread
from torch.utils._python_dispatch import _disable_current_modes

from ._autograd import Autograd, remove_abandoned_hooks
from ._calls import (
    FUNCTION_CALL,
    CollectiveCall,
    TorchCall,
    is_call_for_next_transform,
    is_called_by_kernel,
    is_dispatched_in_backward,
)
from ._collectives import is_functional_collective, wait_for_results
from ._detours import set_detours
from ._levels import in_transform, is_within_kernel
from ._modules import (
    ParameterPaths,
    VariableFinder,
    enclose_modules,
    module_path,
    modules_among,
    part_of,
    slot_of,
)
from ._overrides import (
    NO_OVERRIDES,
    WITH_SUBCLASSES,
    ProgramModes,
    WithoutTorchFunction,
    as_class_of,
    call_outside_modes,
    current_overrides,
    has_overrides,
    is_recording_graph,
    leave_overrides,
    without_function_modes,
)
from ._patches import COMPOSABLE_FILE, TorchPatches, forget_torch_callables
from ._reader import make_reader
from ._requirements import ESSENTIAL, NEWEST_TESTED, count_private_names, warn_of_absent_names
from ._schema import binding
from ._straight_through import plain_straight_through
from ._targets import Target, targets
from ._tensors import TorchTensors
from ._transforms import TransformedTensors
from ._views import TorchViews


class TorchDriver(TorchTensors, Autograd, EagerDriver):
    """The driver of PyTorch's eager mode."""

    api = 2
    framework = "torch"
    modes = ("eager",)
    newest_tested = NEWEST_TESTED
    namespace_tag = "pytorch"
    private_names = tuple(f"torch:{path}" for path in ESSENTIAL)
    identity_types = (torch.nn.Parameter,)
    slot_of = staticmethod(slot_of)

    def __init__(self) -> None:
        """Make the patches and views of the driver; nothing is patched before `attach`."""
        super().__init__()
        self._patches = TorchPatches(self)
        self._detour_by_class: dict[type, Detour] = {}
        self.views = TorchViews()

    def register_framework(self) -> None:
        """Register the types and leaves that enter op ids; skip the frames of checkpoints in call sites."""
        super().register_framework()
        self.skip_code(torch.utils.checkpoint.__file__, COMPOSABLE_FILE)
        for callable_type in _CALLABLE_TYPES:
            interceptor.add_identity_type(callable_type)
        interceptor.set_leaf_type(torch.Tensor, _is_trainable_leaf)

    def attach(self) -> None:
        """Intercept native operators, enclose module calls, and patch torch where it leaves the thread.

        Backward passes are patched too.  Logs a warning for each name that this torch lacks.
        """
        warn_of_absent_names()
        if interceptor.NATIVE:
            self.patches.place_stubs(self._targets_by_site)
        else:
            set_detours(self.patches, self._targets_by_site)
        # Operators of torch.ops, TorchScript and custom ops have no native callable of their own.
        self._detour_call_methods()
        enclose_modules(self.patches)
        self.patch_backward_passes(self.patches)
        self._patches.install(self.patches)

    def detach(self) -> None:
        """Undo all changes of torch, with the hooks that interrupted passes have left at nodes.

        Without native code dynamo's list of torch's callables is cleared as well.
        """
        remove_abandoned_hooks()  # of passes that an interrupt ended: they would outlive the scope
        super().detach()
        if not interceptor.NATIVE:
            # dynamo may have listed the stand-ins, and would not recognise torch's functions again.
            forget_torch_callables()

    @cached_property
    def reader(self) -> Reader | None:  # type: ignore[override]
        """Return the reader of tensors for native code; None where there is none."""
        return self._reader_and_missing_parts[0]

    @cached_property
    def _reader_and_missing_parts(self) -> tuple[Reader | None, str]:
        return make_reader(plain_straight_through) if interceptor.NATIVE else (None, "")

    def missing_native_support(self) -> str:
        """Return the parts that native code lacks to read the tensors of this torch; "" if it lacks none."""
        return self._reader_and_missing_parts[1]

    def self_test_program(self) -> SelfTestProgram:
        """Return a program of one op and its backward op."""
        return SelfTestProgram(_run_tanh, "tanh", "tanh")

    def private_name_count(self) -> int:
        """Return the number of undocumented names of torch that are there."""
        return count_private_names()

    @cached_property
    def _targets_by_site(self) -> dict[Site, Target]:
        return {self._make_site(target): target for target in targets()}

    def _make_site(self, target: Target) -> Site:
        """Return the site of a native callable, with flags for how the interceptor treats its calls."""
        if target.kind == "classmethod":
            return Site(
                target.callable, target.callable, "Function.apply", digest("Function.apply"),
                self.handle, TRANSPARENT | IMPLEMENTATION,
            )  # fmt: skip
        op = PropertyRead(target.callable) if target.kind == "getset" else target.callable
        # Ops call `as_subclass` to give their results the class of a Tensor subclass: it is part of them.
        flags = IMPLEMENTATION if target.name == "as_subclass" else 0
        flags |= ONE_PLACE if target.name in _MOVING_OPS else 0
        return self.site(target.callable, op, target.canonical, flags)

    def _detour_call_methods(self) -> None:
        """Replace `__call__` of operators and scripted functions, which have no native callables."""
        classes: list[tuple[Any, str, int]] = [
            (torch._ops.OpOverload, "OpOverload", IMPLEMENTATION),
            (torch._ops.OpOverloadPacket, "OpOverloadPacket", IMPLEMENTATION),
            (torch._C.ScriptFunction, "ScriptFunction", 0),
            (torch._C.ScriptMethod, "ScriptMethod", 0),
            # Under transforms `Function.apply` calls this, not the native `apply`.
            (type(FUNCTION_CALL), "Function.apply", TRANSPARENT | IMPLEMENTATION),
        ]
        for callable_class, key, flags in classes:
            call = vars(callable_class)["__call__"]
            # The same detour in each scope, unless the program has patched `__call__` in between.
            detour = self._detour_by_class.get(callable_class)
            if detour is None or detour.__wrapped__ is not call:
                detour = Detour(Site(call, call, key, digest(key), self.handle, flags))
                self._detour_by_class[callable_class] = detour
            self.patches.set(callable_class, "__call__", detour)

    def handle(
        self, state: Any, call_cache: CallCache | None, op_id: int, site: Site, args: tuple[Any, ...],
        kwargs: dict[str, Any], key: int = 0, resumption: Resumption | None = None,
    ) -> Any:  # fmt: skip
        """Bring an op of the program to the core, outside of the program's overrides and modes.

        So what the driver reads of tensors calls no `__torch_function__` of the user's.
        Other calls are only made: those of torch within an op or a kernel, and those that `symbolic_trace`
        records.  The latter, and calls of TorchScript, are reported.
        state: of the scopes in force, or a recorder of graph mode, which records the call instead.
        key: of the call in native code, 0 for none.  resumption: of a call that native code has begun.
        """
        if type(state) is not State:  # a recorder, which collects the ops of a graph's nodes
            return state.record(self.bind, site, args, kwargs)
        if _is_made_by_torch(site, args, sys._getframe(1), is_resumed=resumption is not None):
            return site.invoke(args, kwargs)
        if site.key in _SCRIPT_SITES:
            state.report(f"inside of TorchScript {args[0].name}", "it runs as one op")
        if _has_proxies(args, kwargs):
            state.report("torch.fx.symbolic_trace", RECORDED_AS_IS)
            return site.invoke(args, kwargs)
        is_transformed = in_transform()
        if is_transformed and is_within_kernel():
            return site.invoke(args, kwargs)
        if site.key in _SITES_WITH_CALLEE:
            is_collective = is_functional_collective(args[0])
        else:
            is_collective = site.key.startswith("c10d::")
        if is_collective:
            key = 0  # native code knows no value that is still on its way, and no list of lists
        arguments = state, call_cache, op_id, site, args, kwargs, key, resumption
        # First the kind of driver for this op, then the modes and overrides outside of which it works.
        if is_transformed:
            driver_class: type[DriverOutsideModes] = DriverInTransform
        elif site.key == "alias" and site.target is _AS_SUBCLASS:
            driver_class = DriverForUnfinishedResult
        else:
            driver_class = DriverOutsideModes
        # The common cases need no context manager: no override in force, or only those of subclasses.
        if torch._C._len_torch_dispatch_stack():
            with leave_overrides() as modes:
                return EagerDriver.handle(driver_class(self, modes), *arguments)
        overrides = current_overrides()
        if overrides is None:
            driver = DriverInTransform(self, NO_OVERRIDES) if driver_class is DriverInTransform else self
            return EagerDriver.handle(driver, *arguments)
        with WithoutTorchFunction():
            if overrides is WITH_SUBCLASSES and driver_class is DriverOutsideModes:
                return EagerDriver.handle(self.outside_overrides, *arguments)
            return EagerDriver.handle(driver_class(self, overrides), *arguments)

    @cached_property
    def outside_overrides(self) -> "TorchDriver":
        """Return this driver for calls under overrides of tensor subclasses, but no dispatch mode."""
        return DriverOutsideModes(self, WITH_SUBCLASSES)

    def driver_of_pass(self) -> "TorchDriver":
        """Return this driver for the routines of a backward pass that starts now."""
        return DriverInTransform(self, WITH_SUBCLASSES) if in_transform() else self.outside_overrides

    def call_without_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine outside of the program's autograd and modes."""
        return call_outside_modes(func, values, kwargs)

    def call_observer(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine that changes no value, outside of modes and of overrides of tensor subclasses."""
        return call_outside_modes(func, values, kwargs, overrides=False)

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call with its inputs in schema order; an object that is called through is the op.

        The op of an overload is its packet, that of a scripted function a `ScriptedOp`.
        """
        target = self._targets_by_site.get(site)
        if target is not None and target.kind != "classmethod":
            bound = binding(site.target, args, kwargs)
            call_class = CollectiveCall if site.key.startswith("c10d::") else TorchCall
            return call_class(site, site.op, (), args, kwargs, bound, target.inplace, self.invoke)
        # The op comes first among the arguments; under transforms after `FUNCTION_CALL`, which brings a
        # Function to each of them.
        callee_count = 2 if args[0] is FUNCTION_CALL else 1
        callee, op_args = args[callee_count - 1], args[callee_count:]
        # The overloads of an operator are one op to tools.
        op = ScriptedOp(callee) if site.key in _SCRIPT_SITES else getattr(callee, "overloadpacket", callee)
        return TorchCall(
            site, op, args[:callee_count], op_args, kwargs, binding(callee, op_args, kwargs), in_place=False,
            invoke_site=self.invoke,
        )  # fmt: skip

    def flatten_with_unreturned(
        self, call: Call, outputs: Any, inputs: Sequence[Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return outputs and unreturned written inputs of an op as a list, and what puts it back into form.

        Waits for the results of a functional collective first.
        """
        values, rebuild = super().flatten_with_unreturned(call, outputs, inputs)
        if is_functional_collective(call.op):
            wait_for_results(values)
        return values, rebuild

    def uninstrumented_reason(self, site: Site) -> tuple[str, str] | None:
        """Return the obstacle to instrumenting ops at this moment, and the reason; None if there is none."""
        if torch._C._get_tracing_state() is not None:
            return "torch.jit.trace", RECORDED_AS_IS
        if torch._C._len_torch_dispatch_stack() and is_recording_graph():
            return "a graph by make_fx", RECORDED_AS_IS
        return None

    def identity_values(self, call: Call) -> list[Any]:
        """Return the parameters, also in lists, that enter the op's id; none for an op that moves them."""
        if getattr(call.op, "__name__", "") in _MOVING_OPS:
            return []
        parameters = []
        for value in call.inputs:
            value_type = type(value)
            if value_type is torch.nn.Parameter:
                parameters.append(value)
            # Torch's `isinstance` takes tensors of some other classes for parameters, too.
            elif isinstance(value, (list, tuple)) or (
                value_type is not torch.Tensor and isinstance(value, torch.Tensor)
            ):
                parameters += [item for item in spread([value]) if isinstance(item, self.identity_types)]
        return parameters

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of a call's op, with the calling module's path and functions that find parameters.

        subjects: the modules that enclose the call, the outermost first.
        """
        facts = super().describe(call, subjects)
        modules = modules_among(subjects)
        facts.scope = module_path(modules)
        facts.variable_of, facts.part_of = VariableFinder(modules), part_of
        facts.path_of = ParameterPaths(modules)
        return facts


_AS_SUBCLASS: Any = torch.Tensor.as_subclass
_CALLABLE_TYPES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.autograd.function.FunctionMeta)
RECORDED_AS_IS = "the ops are recorded as they are"
# Keys of sites, which are callables that are no ops themselves: the first argument of a call is.
_SCRIPT_SITES = frozenset({"ScriptFunction", "ScriptMethod"})
_MOVING_OPS = frozenset({"to", "cpu", "cuda"})
"""Ops by which libraries move parameters to a device anew for each call; each call is the same op."""
_OPERATOR_SITES = frozenset({"OpOverload", "OpOverloadPacket"})
_SITES_WITH_CALLEE = _OPERATOR_SITES | {"Function.apply"}


_tensor_class: Any = torch.Tensor  # its stubs show the values of properties, not the properties
_REQUIRES_GRAD, _IS_LEAF, _BASE = (
    attribute.__get__
    for attribute in (_tensor_class.requires_grad, _tensor_class.is_leaf, _tensor_class._base)
)


def _is_trainable_leaf(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a leaf that needs a gradient, such as weights of code without modules.

    False for a view of a tensor that needs one.
    """
    with WithoutTorchFunction():
        if not _REQUIRES_GRAD(tensor):
            return False
        # If the base of a view was written, `is_leaf` makes a node, which is of the op that reads the view.
        base = _BASE(tensor)
        return bool((base is None or not _REQUIRES_GRAD(base)) and _IS_LEAF(tensor))


def _is_made_by_torch(site: Site, args: tuple[Any, ...], caller: FrameType, is_resumed: bool) -> bool:
    """Return True for a call that torch makes for itself or within an op, and that is not an op itself.

    caller: frame of the call.  is_resumed: whether native code has begun the call, which then is an op.
    """
    if site.key in _SITES_WITH_CALLEE and _is_internal_to_torch(args[0]):
        return True
    if site.key == "Function.apply" and is_call_for_next_transform(caller):
        return True
    if is_resumed:
        return False
    return is_called_by_kernel(caller) or (site.key in _OPERATOR_SITES and is_dispatched_in_backward(caller))


def _has_proxies(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if `torch.fx.symbolic_trace` records the call: an argument is one of its proxies."""
    # Proxies override functions: the first test spares most calls the look at each argument.
    return has_overrides(args, kwargs) and any(
        isinstance(value, torch.fx.Proxy) for value in spread((*args, *kwargs.values()))
    )


def _is_internal_to_torch(called: Any) -> bool:
    """Return True for a callable of torch that runs hooks or profiles, and computes nothing."""
    if called is torch.nn.modules._functions.BackwardHookFunction:
        return True
    return getattr(called, "_qualified_op_name", getattr(called, "_name", "")).startswith("profiler::")


class DriverOutsideModes(TorchDriver):
    """The driver while it works outside of the program's modes; it shares the state of the driver proper.

    Whatever runs for the program, ops and routines in the place of ops, runs under these modes again.
    """

    __slots__ = ("_modes",)

    def __init__(self, driver: TorchDriver, modes: ProgramModes) -> None:
        self.__dict__ = driver.__dict__  # shared, not copied: one set of sites and caches
        self._modes = modes

    def invoke(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the program's, under its modes."""
        with self._modes.enter():
            return site.invoke(args, kwargs)

    def call_in_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine that computes for the program, under its modes."""
        with self._modes.enter():
            return func(*values, **kwargs)

    def uninstrumented_reason(self, site: Site) -> tuple[str, str] | None:
        """Return the obstacle to instrumenting ops at this moment, and the reason; None if there is none."""
        if self._modes is WITH_SUBCLASSES:  # overrides of subclasses record no graph
            return super().uninstrumented_reason(site)
        with self._modes.enter():
            return super().uninstrumented_reason(site)


class DriverForUnfinishedResult(DriverOutsideModes):
    """The driver at `as_subclass`, whose result a class may complete later, in its own `__new__`."""

    def call_without_autodiff(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine without the overrides of the class, which may need attributes that are absent."""
        return call_outside_modes(func, values, kwargs, overrides=False)

    def straight_through(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `value` in place of `original`, as an instance of the class of `original`."""
        return as_class_of(original, super().straight_through(original, value))  # type: ignore[no-any-return]


class DriverInTransform(TransformedTensors, DriverOutsideModes):
    """The driver within function transforms of torch.func."""


def _run_tanh() -> list[float]:
    """Return tanh of two numbers and its gradient, for the self-test; in none of the program's modes."""
    with _disable_current_modes(), without_function_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.tensor([0.5, -0.25], dtype=torch.float64, device="cpu", requires_grad=True)
        y = torch.tanh(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return [*y.tolist(), *gradient.tolist()]


class ScriptedOp:
    """The op of a call of a TorchScript function, with the function's name."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.__name__: str = function.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class PropertyRead:
    """The op of reading a tensor's property, such as `x.T`."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor
        self.__name__: str = descriptor.__name__
        self.__qualname__: str = descriptor.__qualname__

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self._descriptor.__get__(tensor)

    def __repr__(self) -> str:
        return f"<read of {self.__qualname__}>"
