"""PyTorch: an op of a match is put off until its output is read, which seldom comes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.rewrite._program import Node
from amanda.tools.rewrite._stand_ins import (
    HOOKS,
    Form,
    aliased,
    delay_of,
    delayed,
    form_of,
    memory,
    tensors,
    value_of,
)
from amanda.tools.rewrite._steps import Step, Steps

if TYPE_CHECKING:
    import torch

_FORMS_KEPT = 4096


class TorchSteps(Steps):
    """Puts ops off once it knows what form their outputs have; the first execution of each kind computes.

    read: told of each step whose output something outside of its match reads.
    """

    def __init__(self, read: Callable[[Step], None]) -> None:
        super().__init__()
        self._read = read
        self._forms: dict[Hashable, Form | None] = {}
        self.waiting: weakref.WeakSet[Delay] = weakref.WeakSet()

    def take(self, node: Node, inputs: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """Return a stand-in for the output, or the output itself where its form is not known yet."""
        delay = Delay(node, inputs, compute, self.makers(inputs), self._read)
        key = (node.op, _signature(inputs), delay.modes)
        known = key in self._forms
        form = self._forms.get(key)
        if form is not None and (form.is_own or any(delay_of(one) for one in inputs)):
            self.waiting.add(delay)
            return delayed(delay, form)
        value = delay.value()
        if not known:
            if len(self._forms) >= _FORMS_KEPT:
                self._forms.clear()
            self._forms[key] = form_of(value, inputs)
        for one in tensors([value]):
            self._made[one] = delay
        return value

    def of(self, value: Any) -> Step | None:
        """The step that a value stands for, or that made it."""
        return delay_of(value) or next((super(TorchSteps, self).of(one) for one in tensors([value])), None)

    def settle(self, written: Sequence[Any] = ()) -> None:
        """Compute what was put off and reads any of these tensors; else all."""
        for delay in list(self.waiting) if self.waiting else ():
            if not written:
                delay.value()
            elif memory(written) & memory(delay.inputs):
                delay.value()
                delay.is_written = True


class Delay(Step):
    """An execution that is put off.

    modes: autograd and autocast, as they were when it was due; below autograd, where a kernel has it
    computed, the keys of dispatch are restored too.
    is_written: whether its inputs were written after it; a write through `.data` has another version.
    is_put_off: whether a tensor stands for the output, whose gradient goes to tensors of its own.
    """

    def __init__(
        self,
        node: Node,
        inputs: Sequence[Any],
        compute: Callable[..., Any],
        makers: Sequence[Step | None],
        read: Callable[[Step], None],
    ) -> None:
        import torch

        super().__init__(node, inputs, compute, makers)
        devices = sorted({one.device.type for one in tensors(inputs)})
        self.modes: tuple[Any, ...] = (
            torch.is_grad_enabled(),
            *((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
              for device in devices if torch.amp.is_autocast_available(device)),
        )  # fmt: skip
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self._versions = _versions(inputs)
        self._read = read
        self.is_written = self.is_put_off = False
        self._given: Sequence[Any] = ()
        self._random: Any = None
        self._value: Any = None
        self._lock = threading.RLock()

    @property
    def is_intact(self) -> bool:
        """True if nothing has been written into the inputs of the op since it was called."""
        return not self.is_written and _versions(self.inputs) == self._versions

    def is_read(self) -> bool:
        """Return where the output was computed to learn its form, the hooks on it are those of a tensor."""
        if any(one._backward_hooks or one.retains_grad for one in tensors([self._value])):
            self.reader = self.reader or HOOKS[0]
        return super().is_read()

    def value(self) -> Any:
        """The output, computed at most once."""
        import torch
        from torch.utils.checkpoint import get_device_states

        with self._lock:
            if self._value is None:
                self._random = torch.get_rng_state(), get_device_states(*tensors(self.inputs))
                self._value, self._given = self._computed()
            return self._value

    def differentiable(self) -> tuple[Any, Sequence[Any]]:
        """The output, and the tensors to which its gradients go, in the place of the inputs."""
        return self.value(), self._given

    def again(self) -> tuple[Any, Sequence[Any]]:
        """The same, computed once more from the same state of the random generators."""
        import torch
        from torch.utils.checkpoint import set_device_states

        self.value()
        state, (devices, states) = self._random
        with torch.random.fork_rng(devices):
            torch.set_rng_state(state)
            set_device_states(devices, states)
            return self._computed()

    def _computed(self) -> tuple[Any, Sequence[Any]]:
        with amanda.disabled(), self._as_it_was():
            given = [aliased(one) if self.is_put_off else value_of(one) for one in self.inputs]
            return self.compute(*given), given

    def read(self, reader: str) -> Any:
        """The output, for a reader outside of the match."""
        if not self.reader:
            self.reader = reader
            self._read(self)
        return self.value()

    def _as_it_was(self) -> ExitStack:
        import torch

        grad, *autocast = self.modes
        stack = ExitStack()
        stack.enter_context(torch._C._ForceDispatchKeyGuard(*self._keys))
        stack.enter_context(torch.set_grad_enabled(grad))
        for device, enabled, dtype in autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        return stack


def _versions(values: Sequence[Any]) -> list[int | None]:
    return [None if one.is_inference() else one._version for one in tensors(values)]


def _signature(values: Sequence[Any]) -> Hashable:
    """Return all that the form of an output depends on."""
    return tuple([_sign(one) for one in values])


def _sign(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return _signature(value)
    for one in tensors([value]):
        own: torch.Tensor = one
        return own.shape, own.stride(), own.dtype, own.device, own.requires_grad, bool(delay_of(own))
    return type(value), repr(value)
