"""The driver itself: which calls it intercepts and how each reaches the core."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.utils.checkpoint
from amanda import interceptor
from amanda.backend import Call, EagerDriver, Namespace, State, digest
from amanda.interceptor import IMPLEMENTATION, ONE_PLACE, TRANSPARENT, Detour, Memo, Reader, Site
from amanda.plan import spread

from ._autograd import Autograd, remove_abandoned_hooks
from ._calls import CollectiveCall, TorchCall
from ._collectives import PROCESS_GROUP, is_functional, wait
from ._kernels import is_dispatched_again, is_part_of_op
from ._modules import Paths, enclose_modules, module_path, part_of, slot_of
from ._overrides import SEEN, Modes, Unseen, call_alone, current, is_recorded, left, of_class, overridden
from ._reader import reader
from ._requirements import check
from ._schema import binding
from ._straight_through import plain_straight_through
from ._surroundings import Surroundings, let_compiler_look_again
from ._targets import NAMESPACES, Target, targets
from ._tensors import TorchTensors
from ._views import TorchViews


class TorchDriver(TorchTensors, Autograd, EagerDriver):
    """PyTorch, eager mode."""

    api = 1
    framework = "torch"
    modes = ("eager",)
    identity_types = (torch.nn.Parameter,)
    slot_of = staticmethod(slot_of)

    def __init__(self) -> None:
        super().__init__()
        self._surroundings = Surroundings(self)
        self._detours: dict[type, Detour] = {}
        self.views = TorchViews()

    @cached_property
    def namespace(self) -> Namespace:
        """`pytorch/<version>/eager`."""
        return Namespace(f"pytorch/{torch.__version__.split('+')[0]}/eager")

    def introduce(self) -> None:
        """Add the callables that tell ops apart; leave the frames of checkpoints out of the places."""
        super().introduce()
        self.skip(torch.utils.checkpoint.__file__)
        for kind in _CALLED:
            interceptor.add_identity_type(kind)
        interceptor.set_leaf_type(torch.Tensor, _is_trained)

    def attach(self) -> None:
        """Place every site, enclose module calls, and follow torch where it leaves the thread."""
        check()
        if interceptor.NATIVE:
            for site in self._native_sites:
                site.place()
        else:
            self._replace_by_attribute()
        self._detour_calls()
        enclose_modules(self.attributes)
        self.follow_backward(self.attributes)
        self._surroundings.enter(self.attributes)

    def detach(self) -> None:
        """Leave torch as it was."""
        remove_abandoned_hooks()
        super().detach()
        if interceptor.NATIVE:
            for site in self._native_sites:
                site.remove()
        else:
            let_compiler_look_again()

    @cached_property
    def _native_sites(self) -> list[Site]:
        return list(self._targets)

    @cached_property
    def reader(self) -> Reader | None:  # type: ignore[override]
        """Return the reader of tensors for native code; None where there is none."""
        return self._reading[0]

    @cached_property
    def _reading(self) -> tuple[Reader | None, str]:
        return reader(plain_straight_through) if interceptor.NATIVE else (None, "")

    def slowdown(self) -> str:
        """Say what native code lacks to read the tensors of this torch; "" where it lacks nothing."""
        return self._reading[1]

    @cached_property
    def _targets(self) -> dict[Site, Target]:
        return {self._site(target): target for target in targets()}

    def _site(self, target: Target) -> Site:
        if target.kind == "classmethod":
            return Site(
                target.callable, target.callable, "Function.apply", digest("Function.apply"),
                self.handle, TRANSPARENT | IMPLEMENTATION,
            )  # fmt: skip
        op = PropertyRead(target.callable) if target.kind == "getset" else target.callable
        # Inside another op it is how that op gives its result the class of a Tensor subclass.
        flags = IMPLEMENTATION if target.name == "as_subclass" else 0
        flags |= ONE_PLACE if target.name in _MOVES else 0
        return self.site(target.callable, op, target.canonical, flags)

    def _detour_calls(self) -> None:
        """Replace the calls by which torch runs what has no native callable of its own."""
        holders: list[tuple[Any, int]] = [
            (torch._ops.OpOverload, IMPLEMENTATION),
            (torch._ops.OpOverloadPacket, IMPLEMENTATION),
            (torch._C.ScriptFunction, 0),
            (torch._C.ScriptMethod, 0),
        ]
        for holder, flags in holders:
            call = vars(holder)["__call__"]
            if holder not in self._detours or self._detours[holder].__wrapped__ is not call:
                site = Site(call, call, holder.__name__, digest(holder.__name__), self.handle, flags)
                self._detours[holder] = Detour(site)
            self.attributes.set(holder, "__call__", self._detours[holder])

    def _replace_by_attribute(self) -> None:
        special = (torch.special, torch.linalg, torch.fft, torch.sparse, torch.nested)
        native = [getattr(torch._C, name) for name in NAMESPACES if name != "_VariableFunctions"]
        holders = [torch, torch.functional, torch.nn.functional, *special, *native]
        detours = {site.target: Detour(site) for site in self._native_sites}
        self.attributes.replace(
            detours, [*holders, torch.Tensor, torch.autograd.function._SingleLevelFunction, *_GROUPS]
        )
        functions = Functions(torch._C._VariableFunctions, detours)
        self.attributes.set(torch._C, "_VariableFunctions", functions)
        self.attributes.set(torch._VF, "vf", functions)

    def handle(
        self,
        state: Any,
        memo: Memo | None,
        op_id: int,
        site: Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: int = 0,
        done: tuple[Any, ...] | None = None,
    ) -> Any:
        """Bring a call to the core; what the driver reads of tensors reaches no override of the user's."""
        if type(state) is not State:
            return state.record(self.bind, site, args, kwargs)  # a graph is run to see what its nodes come to
        if site.key in _HEADED and _is_machinery(args[0]):
            return site.invoke(args, kwargs)
        caller = sys._getframe(1)
        if done is None and (
            is_part_of_op(caller) or (site.key in _OVERLOADS and is_dispatched_again(caller))
        ):
            return site.invoke(args, kwargs)
        if site.key in _SCRIPTED:
            state.report(f"inside of TorchScript {args[0].name}", "it runs as one op")
        if overridden(args, kwargs) and any(
            isinstance(one, torch.fx.Proxy) for one in (*args, *kwargs.values())
        ):
            state.report("torch.fx.symbolic_trace", RECORDED)
            return site.invoke(args, kwargs)
        if is_functional(args[0]) if site.key in _HEADED else site.key.startswith("c10d::"):
            key = 0  # native code knows no value that is still on its way, and no list of lists
        told = state, memo, op_id, site, args, kwargs, key, done
        within = Incomplete if site.key == "alias" and site.target is _AS_SUBCLASS else Within
        if torch._C._len_torch_dispatch_stack():
            with left() as modes:
                return EagerDriver.handle(within(self, modes), *told)
        overrides = current()
        if overrides is None:
            return EagerDriver.handle(self, *told)
        with Unseen():
            shared = overrides is SEEN and within is Within
            return EagerDriver.handle(self.seen if shared else within(self, overrides), *told)

    @cached_property
    def seen(self) -> "TorchDriver":
        """This driver for calls under no dispatch mode."""
        return Within(self, SEEN)

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine outside of the program's autograd and modes."""
        return call_alone(func, values, kwargs)

    def call_observer(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine that changes no value, also outside of what tensor subclasses override."""
        return call_alone(func, values, kwargs, overrides=False)

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its inputs in schema order."""
        target = self._targets.get(site)
        if target is not None and target.kind != "classmethod":
            bound = binding(site.target, args, kwargs)
            kind = CollectiveCall if site.key.startswith("c10d::") else TorchCall
            return kind(site, site.op, (), args, kwargs, bound, target.inplace, self.invoke)
        head, rest = args[:1], args[1:]
        op = Scripted(head[0]) if site.key in _SCRIPTED else getattr(head[0], "overloadpacket", head[0])
        return TorchCall(site, op, head, rest, kwargs, binding(head[0], rest, kwargs), False, self.invoke)

    def results(
        self, call: Call, outputs: Any, inputs: Sequence[Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """An op's outputs as a list; those of a functional collective are waited for."""
        values, rebuild = super().results(call, outputs, inputs)
        if is_functional(call.op):
            wait(values)
        return values, rebuild

    def obstacle(self, site: Site) -> tuple[str, str] | None:
        """Return what keeps ops from being instrumented at this moment, and why."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return TRANSFORM, WITHIN_TRANSFORM
        if torch._C._get_tracing_state() is not None:
            return "torch.jit.trace", RECORDED
        if torch._C._len_torch_dispatch_stack() and is_recorded():
            return "a graph by make_fx", RECORDED
        return None

    def identities(self, call: Call) -> list[Any]:
        """The parameters that tell the call from others; none of one that brings parameters elsewhere."""
        if getattr(call.op, "__name__", "") in _MOVES:
            return []
        found = []
        for value in call.inputs:
            kind = type(value)
            if kind is torch.nn.Parameter:
                found.append(value)
            elif isinstance(value, (list, tuple)) or (
                kind is not torch.Tensor and isinstance(value, torch.Tensor)
            ):
                found += [one for one in spread([value]) if isinstance(one, self.identity_types)]
        return found

    def variable_of(self, value: Any) -> Any:
        """The parameter, or the leaf, that a tensor is or is a view of."""
        if not isinstance(value, torch.Tensor):
            return None
        with Unseen():  # routines ask, too
            base = value if value._base is None else value._base
            is_held = isinstance(base, torch.nn.Parameter) or (base.requires_grad and base.is_leaf)
            return base if is_held else None

    def part_of(self, value: Any, variable: Any) -> str:
        """The part of a parameter that a view of it is."""
        with Unseen():
            return part_of(value, variable)

    def path_of(self, subjects: Any) -> Paths:
        """Return what tells the paths of parameters in the enclosing modules."""
        return Paths(subjects)

    def scope_name(self, subjects: Any) -> str:
        """Path of the calling module in the model."""
        return module_path(subjects)


_AS_SUBCLASS: Any = torch.Tensor.as_subclass
_CALLED = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.autograd.function.FunctionMeta)
RECORDED = "the ops are recorded as they are"
TRANSFORM = "a torch.func transform (vmap, grad, ...)"
WITHIN_TRANSFORM = "the ops inside run as they are"
_GROUPS = [PROCESS_GROUP] if PROCESS_GROUP else []
_SCRIPTED = frozenset({"ScriptFunction", "ScriptMethod"})
_MOVES = frozenset({"to", "cpu", "cuda"})
"""Names of ops by which libraries bring parameters anew for each call: it is the same op each time."""
_OVERLOADS = frozenset({"OpOverload", "OpOverloadPacket"})
_HEADED = _OVERLOADS | {"Function.apply"}
"""Sites whose first argument says what is called."""


_tensor_class: Any = torch.Tensor  # its stubs show the values of properties, not the properties
_REQUIRES_GRAD, _IS_LEAF = _tensor_class.requires_grad.__get__, _tensor_class.is_leaf.__get__


def _is_trained(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is a leaf that needs a gradient, as what functions without modules train."""
    with Unseen():
        return bool(_REQUIRES_GRAD(tensor) and _IS_LEAF(tensor))


def _is_machinery(called: Any) -> bool:
    """Return True if torch uses it to run hooks and profiles; it computes nothing."""
    if called is torch.nn.modules._functions.BackwardHookFunction:
        return True
    return getattr(called, "_qualified_op_name", getattr(called, "_name", "")).startswith("profiler::")


class Within(TorchDriver):
    """The driver outside of modes of the program, which shares all that it holds."""

    __slots__ = ("_modes",)

    def __init__(self, driver: TorchDriver, modes: Modes) -> None:
        self.__dict__ = driver.__dict__
        self._modes = modes

    def invoke(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the program's, under its modes."""
        with self._modes.entered():
            return site.invoke(args, kwargs)

    def call(self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a routine that computes for the program, under its modes."""
        with self._modes.entered():
            return func(*values, **kwargs)

    def obstacle(self, site: Site) -> tuple[str, str] | None:
        """Return what keeps ops from being instrumented at this moment, and why."""
        with self._modes.entered():
            return super().obstacle(site)


class Incomplete(Within):
    """The driver at an op whose result is of a class that may complete it later, in its own `__new__`."""

    def call_isolated(
        self, func: Callable[..., Any], values: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call a routine outside of what the class overrides, for which the result may lack attributes."""
        return call_alone(func, values, kwargs, overrides=False)

    def straight_through(self, original: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`value` for `original`, of its class."""
        return of_class(original, super().straight_through(original, value))  # type: ignore[no-any-return]


class Functions:
    """Stands in for an object whose functions cannot be set: as they are, or detoured."""

    def __init__(self, functions: Any, detours: Mapping[Any, Detour]) -> None:
        self._functions = functions
        self._detours = detours

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        return self._detours.get(function, function)

    def __dir__(self) -> list[str]:
        return dir(self._functions)


class Scripted:
    """The op that a call of a TorchScript function is."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.__name__: str = function.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class PropertyRead:
    """The op that reading a tensor's property is, such as `x.T`."""

    def __init__(self, descriptor: Any) -> None:
        self._descriptor = descriptor
        self.__name__: str = descriptor.__name__
        self.__qualname__: str = descriptor.__qualname__

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self._descriptor.__get__(tensor)

    def __repr__(self) -> str:
        return f"<read of {self.__qualname__}>"
