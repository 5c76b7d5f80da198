"""Delayed ops in PyTorch: a stand-in is the output of an op of a match, and is computed if it is read."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import amanda
from amanda.tools.kit import RequiredNames, leaves
from amanda.tools.libraries import tree_map
from amanda.tools.rewrite._program import Node
from amanda.tools.rewrite._steps import Step, Steps

if TYPE_CHECKING:
    import torch

_REQUIRED = RequiredNames(
    "amanda.tools.rewrite",
    "torch",
    "torch:UntypedStorage._cdata",
    "torch:Tensor._backward_hooks",
    "torch:Tensor._make_wrapper_subclass",
    "torch:Tensor._version",
    "torch:_C._ForceDispatchKeyGuard",
    "torch:_C._disabled_torch_function_impl",
    "torch:_C._dispatch_tls_local_exclude_set",
    "torch:_C._dispatch_tls_local_include_set",
)

HOOKS = ("register_hook", "retain_grad")
"""Methods that ask for the gradient, which arrives only if the match is not replaced."""

_READERS = (
    "numpy", "tolist", "data_ptr", "storage", "untyped_storage", "share_memory_", "__array__", "__dlpack__",
    "__deepcopy__", "__reduce_ex__", "__repr__",
)  # fmt: skip
"""Methods that read a tensor without a kernel."""

_FORMS_KEPT = 4096


class Form(NamedTuple):
    """Facts of an op's output besides its elements; is_own: whether no input shares its memory."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_own: bool


class TorchSteps(Steps):
    """Steps that delay ops once the form of their outputs is known; first executions compute."""

    def __init__(self, read: Callable[[Step], None]) -> None:
        super().__init__(read)
        self._forms: dict[Hashable, Form | None] = {}
        self.waiting: weakref.WeakSet[Delay] = weakref.WeakSet()

    def take(self, node: Node, inputs: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """Return a stand-in for the output, or the output itself if its form is not known yet."""
        delay = Delay(node, inputs, compute, self.makers(inputs), on_read=self._read)
        key = (node.op, _signature(inputs), delay.modes)
        known = key in self._forms
        form = self._forms.get(key)
        if form is not None and (form.is_own or any(delay_of(one) for one in inputs)):
            self.waiting.add(delay)
            return delay.stand_in(form)
        value = delay.value()
        if not known:
            if len(self._forms) >= _FORMS_KEPT:
                self._forms.clear()
            self._forms[key] = _form_of(value, inputs)
        for one in _tensors([value]):
            self._made[one] = delay
        return value

    def of(self, value: Any) -> Step | None:
        """Return the step that a value stands for, or the step that made the value."""
        return delay_of(value) or super().of(value)

    def settle(self, written: Sequence[Any] = ()) -> None:
        """Compute each delayed op that reads a tensor of `written`; without tensors, each delayed op."""
        for delay in list(self.waiting) if self.waiting else ():
            if not written:
                delay.value()
            elif _memory(written) & _memory(delay.inputs):
                delay.value()
                delay.is_written = True


@dataclass(eq=False, kw_only=True)
class Delay(Step):
    """A delayed execution.

    on_read: called before the first read outside of the match.
    modes: autograd and autocast at the time of the call; the dispatch keys are restored too, for a reader
    below autograd.  is_written: whether the inputs were written later; a write through `.data` changes no
    version.  is_put_off: whether a stand-in is the output, so that gradients go to tensors of its own.
    """

    on_read: Callable[[Step], None]
    is_written: bool = False
    is_put_off: bool = False

    def __post_init__(self) -> None:
        import torch

        devices = sorted({one.device.type for one in _tensors(self.inputs)})
        self.modes: tuple[Any, ...] = (
            torch.is_grad_enabled(),
            *((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
              for device in devices if torch.amp.is_autocast_available(device)),
        )  # fmt: skip
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self._versions = _versions(self.inputs)
        self._given: Sequence[Any] = ()
        self._random: Any = None
        self._value: Any = None
        self._lock = threading.RLock()

    @property
    def is_intact(self) -> bool:
        """True if no input was written since the op was called."""
        return not self.is_written and _versions(self.inputs) == self._versions

    def is_read(self) -> bool:
        """Return True if the output was read, or has hooks, as one that was computed can have."""
        if any(one._backward_hooks or one.retains_grad for one in _tensors([self._value])):
            self.reader = self.reader or HOOKS[0]
        return super().is_read()

    def stand_in(self, form: Form) -> Any:
        """Return a tensor that stands for the output, with an autograd node for its gradient."""
        if not form.requires_grad:
            return _stand_in(self, form)
        self.is_put_off = True
        made = _classes()[1].apply(self, form, *_tensors(self.inputs))
        made._amanda_delay = self
        return made

    def value(self) -> Any:
        """Return the output, computed at most once."""
        return self.differentiable()[0]

    def differentiable(self) -> tuple[Any, Sequence[Any]]:
        """Return the output, and the tensors in the place of the inputs to which its gradients go."""
        import torch
        from torch.utils.checkpoint import get_device_states

        with self._lock:
            if self._value is None:
                self._random = torch.get_rng_state(), get_device_states(*_tensors(self.inputs))
                self._value, self._given = self._computed()
            return self._value, self._given

    def again(self) -> tuple[Any, Sequence[Any]]:
        """Return the same as `differentiable`, computed again with the same random numbers."""
        import torch
        from torch.utils.checkpoint import set_device_states

        self.value()
        state, (devices, states) = self._random
        with torch.random.fork_rng(devices):
            torch.set_rng_state(state)
            set_device_states(devices, states)
            return self._computed()

    def _computed(self) -> tuple[Any, Sequence[Any]]:
        import torch

        grad, *autocast = self.modes
        with ExitStack() as stack:
            stack.enter_context(amanda.disabled())
            stack.enter_context(torch._C._ForceDispatchKeyGuard(*self._keys))
            stack.enter_context(torch.set_grad_enabled(grad))
            for device, enabled, dtype in autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            given = tree_map(_aliased if self.is_put_off else _value_of, self.inputs)
            return self.compute(*given), given

    def read(self, reader: str) -> Any:
        """Return the output to a reader outside of the match."""
        if not self.reader:
            self.reader = reader
            self.on_read(self)
        return self.value()


def delay_of(value: Any) -> Delay | None:
    """Return the delay behind a stand-in; None for any other value."""
    found: Delay | None = getattr(value, "_amanda_delay", None)
    return found


def _value_of(value: Any) -> Any:
    """Return the output that a value stands for, or the value itself, for an op of the same match."""
    delay = delay_of(value)
    return value if delay is None else delay.value()


def _aliased(value: Any) -> Any:
    """Return an alias of a value, or of the output that it stands for, with gradients of its own."""
    import torch

    if not (isinstance(value, torch.Tensor) and value.requires_grad):
        return _value_of(value)
    if delay_of(value) is None:
        return value.view_as(value)
    return _classes()[2].apply(value, _value_of(value).detach())


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among values, also in lists."""
    from torch import Tensor

    return [one for one in leaves(values) if isinstance(one, Tensor)]


def _memory(values: Sequence[Any]) -> set[int]:
    """Return the storages of tensors."""
    return {one.untyped_storage()._cdata for one in _tensors(values) if delay_of(one) is None}


def _versions(values: Sequence[Any]) -> list[int | None]:
    return [None if one.is_inference() else one._version for one in _tensors(values)]


def _signature(value: Any) -> Hashable:
    """Return the facts of an input, or of a list of inputs, that the form of an output depends on."""
    from torch import Tensor

    if isinstance(value, Tensor):
        delayed = delay_of(value) is not None
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad, delayed
    if isinstance(value, (list, tuple)):
        return tuple([_signature(one) for one in value])
    return type(value), repr(value)


def _form_of(value: Any, inputs: Sequence[Any] = ()) -> Form | None:
    """Return the form of an output; None for several tensors, subclasses and sparse ones."""
    import torch

    if type(value) not in (torch.Tensor, _classes()[0]) or value.layout is not torch.strided:
        return None
    is_own = delay_of(value) is not None or not _memory([value]) & _memory(tree_map(_value_of, inputs))
    return Form(value.shape, value.stride(), value.dtype, value.device, value.requires_grad, is_own)


def _stand_in(delay: Delay, form: Form | None) -> torch.Tensor:
    import torch

    assert form is not None
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _classes()[0], form.shape, strides=form.strides, dtype=form.dtype, device=form.device
    )
    made._amanda_delay = delay  # type: ignore[attr-defined]
    return made


@cache
def _classes() -> tuple[Any, Any, Any]:
    """Return the class of stand-ins, and autograd functions from inputs to it, and on to its output."""
    import torch

    _REQUIRED.check()

    class Delayed(torch.Tensor):
        # torch's functions treat a stand-in as a plain tensor, so that the ops within them are the same
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.detach.default:
                (given,) = args
                return _stand_in(given._amanda_delay, _form_of(given))

            def read(value: Any) -> Any:
                delay = delay_of(value)
                return value if delay is None else delay.read(func.overloadpacket.__name__).detach()

            return func(*tree_map(read, args), **tree_map(read, kwargs or {}))

    class PutOff(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, delay: Delay, form: Form, *inputs: torch.Tensor) -> torch.Tensor:
            ctx.delay = delay
            return _stand_in(delay, form)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            inputs, create_graph = _tensors(ctx.delay.inputs), torch.is_grad_enabled()
            # a second differentiation frees the graph, and this may be called again
            value, given = ctx.delay.again() if create_graph else ctx.delay.differentiable()
            wanted = [a for one, a in zip(inputs, _tensors(given), strict=True) if one.requires_grad]
            found = iter(
                torch.autograd.grad(
                    value, wanted, gradients, retain_graph=True, create_graph=create_graph, allow_unused=True
                )
            )
            return None, None, *(next(found) if one.requires_grad else None for one in inputs)

    class StoodFor(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, stand_in: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return value.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return *gradients, None

    for name in (*_READERS, *HOOKS):
        setattr(Delayed, name, _reading(name, getattr(torch.Tensor, name)))
    return Delayed, PutOff, StoodFor


def _reading(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of stand-ins that counts as a reader, and calls the output's, except for hooks."""

    @wraps(method)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = self._amanda_delay.read(name)
        if name in HOOKS:
            return method(self, *args, **kwargs)
        return getattr(value if self.requires_grad else value.detach(), name)(*args, **kwargs)

    return read
