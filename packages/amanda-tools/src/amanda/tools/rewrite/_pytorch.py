"""PyTorch: an op of a match is put off until its output is read, which seldom comes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, NamedTuple

import torch

import amanda
from amanda.tools.rewrite._dataflow import Node
from amanda.tools.rewrite._steps import Step, Steps

_FORMS_KEPT = 4096


class Form(NamedTuple):
    """What can be told of an op's output without its elements.

    is_own: whether its memory is not that of an input.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_own: bool


class TorchSteps(Steps):
    """Puts ops off once it knows what form their outputs have; the first execution of each kind computes."""

    def __init__(self, read: Callable[[Step], None]) -> None:
        super().__init__()
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self._read = read
        self._forms: dict[Hashable, Form | None] = {}
        self._waiting: weakref.WeakSet[Delay] = weakref.WeakSet()

    def take(self, node: Node, inputs: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """What stands for the output, or the output itself where its form is not known yet."""
        delay = Delay(node, inputs, compute, self.makers(inputs), self._read)
        key = (node.op, _signature(inputs), delay.modes)
        known = key in self._forms
        form = self._forms.get(key)
        if form is not None and (form.is_own or any(isinstance(one, Delayed) for one in inputs)):
            self._waiting.add(delay)
            return _delayed(delay, form)
        value = delay.value()
        if not known:
            if len(self._forms) >= _FORMS_KEPT:
                self._forms.clear()
            self._forms[key] = _form(value, inputs)
        if isinstance(value, torch.Tensor):
            self._made[value] = delay
        return value

    def of(self, value: Any) -> Step | None:
        """The step that a value stands for, or that made it."""
        if isinstance(value, Delayed):
            return value.delay
        return super().of(value) if isinstance(value, torch.Tensor) else None

    def settle(self, written: Sequence[Any] = ()) -> None:
        """Compute what was put off and reads any of these tensors; else all."""
        for delay in list(self._waiting) if self._waiting else ():
            if not written or _memory(written) & _memory(delay.inputs):
                delay.value()


class Delay(Step):
    """An execution that is put off.

    modes: autograd and autocast, as they were when it was due; below autograd, where a kernel has it
    computed, the keys of dispatch are restored too.
    """

    def __init__(
        self,
        node: Node,
        inputs: Sequence[Any],
        compute: Callable[..., Any],
        makers: Sequence[Step | None],
        read: Callable[[Step], None],
    ) -> None:
        super().__init__(node, inputs, compute, makers)
        devices = {one.device.type for one in _tensors(inputs)}
        self.modes = (
            torch.is_grad_enabled(),
            *((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
              for device in sorted(devices) if torch.amp.is_autocast_available(device)),
        )  # fmt: skip
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self._versions = _versions(inputs)
        self._read = read
        self._value: Any = None
        self._lock = threading.RLock()

    @property
    def is_intact(self) -> bool:
        """Whether nothing has been written into its inputs since."""
        return _versions(self.inputs) == self._versions

    def value(self) -> Any:
        """The output, computed at most once."""
        with self._lock:
            if self._value is None:
                with amanda.disabled(), torch._C._ForceDispatchKeyGuard(*self._keys), _modes(self.modes):
                    self._value = self.compute(*map(_value, self.inputs))
            return self._value

    def read(self, reader: str) -> Any:
        """The output, for a reader outside of the match."""
        if not self.reader:
            self.reader = reader
            self._read(self)
        return self.value()


class Delayed(torch.Tensor):
    """Stands for the output of an op that was put off: whatever reads its elements has it computed."""

    delay: Delay
    # torch's functions take it for what it stands for, so that the ops within them are the same
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A kernel is given the output; gradients go by `PutOff`."""
        if func is torch.ops.aten.detach.default:
            (given,) = args
            return _stand_in(given.delay, _form(given, ()))
        reader = func.overloadpacket.__name__
        return func(*_data(args, reader), **_data(kwargs or {}, reader))


def _reading(name: str) -> Callable[..., Any]:
    """A method that no kernel computes."""

    @wraps(getattr(torch.Tensor, name))
    def method(self: Delayed, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.delay.read(name), name)(*args, **kwargs)

    return method


for _name in (
    "numpy", "tolist", "data_ptr", "storage", "untyped_storage", "share_memory_", "__array__", "__dlpack__",
    "__deepcopy__", "__reduce_ex__", "__repr__",
):  # fmt: skip
    setattr(Delayed, _name, _reading(_name))


class PutOff(torch.autograd.Function):
    """Leads gradients that arrive at a stand-in to what the op was given."""

    @staticmethod
    def forward(ctx: Any, delay: Delay, form: Form, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.delay = delay
        return _stand_in(delay, form)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        inputs = list(_tensors(ctx.delay.inputs))
        wanted = [_value(one) for one in inputs if one.requires_grad]
        found = iter(
            torch.autograd.grad(
                ctx.delay.value(), wanted, gradients, retain_graph=True,
                create_graph=torch.is_grad_enabled(), allow_unused=True,
            )
        )  # fmt: skip
        return None, None, *(next(found) if one.requires_grad else None for one in inputs)


def _delayed(delay: Delay, form: Form) -> torch.Tensor:
    if not form.requires_grad:
        return _stand_in(delay, form)
    stand_in: Delayed = PutOff.apply(delay, form, *_tensors(delay.inputs))  # type: ignore[no-untyped-call]
    stand_in.delay = delay
    return stand_in


def _stand_in(delay: Delay, form: Form | None) -> Delayed:
    assert form is not None
    made: Delayed = torch.Tensor._make_wrapper_subclass(
        Delayed, form.shape, strides=form.strides, dtype=form.dtype, device=form.device
    )
    made.delay = delay
    return made


# ---- values ----


def _value(one: Any) -> Any:
    """A value for an op of the same match, which is no outside reader."""
    if isinstance(one, Delayed):
        return one.delay.value()
    if isinstance(one, (list, tuple)) and any(isinstance(each, Delayed) for each in one):
        return type(one)(map(_value, one))
    return one


def _data(given: Any, reader: str) -> Any:
    """Arguments of a kernel with the outputs for what stands for them."""
    if isinstance(given, Delayed):
        return given.delay.read(reader).detach()
    if isinstance(given, (list, tuple)):
        return type(given)(_data(one, reader) for one in given)
    if isinstance(given, dict):
        return {name: _data(one, reader) for name, one in given.items()}
    return given


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def _versions(values: Sequence[Any]) -> list[int | None]:
    return [None if one.is_inference() else one._version for one in _tensors(values)]


def _memory(values: Sequence[Any]) -> set[int]:
    tensors = (one for one in _tensors(values) if not isinstance(one, Delayed))
    return {one.untyped_storage()._cdata for one in tensors}


def _signature(values: Sequence[Any]) -> Hashable:
    return tuple(
        (one.shape, one.stride(), one.dtype, one.device, one.requires_grad, isinstance(one, Delayed))
        if isinstance(one, torch.Tensor)
        else _signature(one) if isinstance(one, (list, tuple)) else (type(one), repr(one))
        for one in values
    )  # fmt: skip


def _form(value: Any, inputs: Sequence[Any]) -> Form | None:
    """The form of an output; None of what cannot be put off: several tensors, subclasses, sparse ones."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    if type(value) not in (torch.Tensor, Delayed):
        return None
    is_own = isinstance(value, Delayed) or not _memory([value]) & _memory([*map(_value, inputs)])
    return Form(value.shape, value.stride(), value.dtype, value.device, value.requires_grad, is_own)


def _modes(modes: Sequence[Any]) -> ExitStack:
    grad, *autocast = modes
    stack = ExitStack()
    stack.enter_context(torch.set_grad_enabled(grad))
    for device, enabled, dtype in autocast:
        stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
    return stack
