"""PyTorch's side of protected ops: stand-ins for parameters, one autograd function, hooks at optimizers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from operator import attrgetter
from threading import Lock
from typing import Any

import amanda
from amanda import interceptor
from amanda.errors import ToolError
from amanda.tools.kit._requirements import check
from amanda.tools.partition._channel import Form, Link, ProtectError
from amanda.tools.partition._pytorch_bytes import packed, unpacked

_OWNERS = ("torch", "torch._C._nn", "torch.Tensor", "torch._C._linalg", "torch._C._special", "torch._C._fft")
_PLAIN = (int, float, bool, str, type(None))


@dataclass(eq=False)
class Crossed:
    """Tensors that cross at an op, or for an optimizer, in both directions together.

    forms: the tensors that were declared, as texts.
    """

    phase: str
    type: str
    module: str
    source: str
    calls: int = 0
    bytes: int = 0
    forms: dict[str, None] = field(default_factory=dict)

    def add(self, sent: Sequence[Form], made: Sequence[Form], size: int) -> None:
        """Count a call."""
        self.calls += 1
        self.bytes += size
        self.forms[f"{' '.join(map(str, sent)) or '-'} > {' '.join(map(str, made)) or '-'}"] = None


@dataclass(eq=False)
class StandIn:
    """A tensor of the program whose values lie in the protected process; NaN is in their place.

    trained: whether it needed a gradient when it was moved.
    gradient, version: the stand-in of its gradient, and autograd's count of writes when it was made.
    """

    path: str
    tensor: Any
    trained: bool
    gradient: Any = None
    version: int = 0

    def check(self, value: Any, where: str) -> None:
        """Raise ProtectError for a tensor in this memory that the process cannot take for the parameter."""
        if value.shape != self.tensor.shape or value.stride() != self.tensor.stride():
            raise ProtectError(f"{where} reads a view of {self.path}; protect knows whole parameters")
        if self.tensor.requires_grad != self.trained:
            raise ProtectError(
                f"{where} reads {self.path}, whose requires_grad was changed after it was protected: freeze "
                "parameters before, or release and protect anew"
            )

    @property
    def is_fresh(self) -> bool:
        """Return True if the program has dropped or zeroed the gradient since."""
        grad = self.tensor.grad
        return grad is None or grad is not self.gradient or grad._version != self.version

    def give_gradient(self) -> None:
        """Give the program's tensor a gradient of NaN."""
        import torch

        with amanda.disabled(), torch.no_grad():
            if self.tensor.grad is None:
                self.tensor.grad = torch.full_like(self.tensor, float("nan"))
            else:
                self.tensor.grad.fill_(float("nan"))
        self.gradient, self.version = self.tensor.grad, self.tensor.grad._version


class Protection:
    """The parameters that were moved, and the process that holds them."""

    def __init__(self) -> None:
        import torch

        check("partition", "torch")
        self._torch: Any = torch
        self._hook: Any = None
        self.crossed: dict[tuple[str, int], Crossed] = {}
        self.dropped: list[int] = []
        self._stand_ins: dict[int, StandIn] = {}
        self._read_openly: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._passes: dict[int, Sequence[str]] = {}
        self._accumulating = Lock()
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @cached_property
    def link(self) -> Link:
        """Start the process, and follow the steps of optimizers from now on."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        started = Link({"threads": self._torch.get_num_threads()})
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return started

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None as long as none was started."""
        return self.link.pid if self._hook is not None else None

    def place(self, phase: str, key: int, kind: str, module: str, source: str) -> Crossed:
        """Return the record of what crosses at an op."""
        return self.crossed.setdefault((phase, key), Crossed(phase, kind, module, source))

    def held(self, value: Any) -> StandIn | None:
        """Return the stand-in in whose memory a value lies."""
        return self._stand_ins.get(value.untyped_storage().data_ptr())

    def adopt(self, context: amanda.OpContext) -> None:
        """Move the parameters and buffers that a selected op reads to the process.

        Raises ProtectError where one cannot be moved, or is read by an op that is not selected.
        """
        where = f"{context['type']} at {context.get_source()}"
        if self._torch.is_autocast_enabled("cpu"):
            raise ProtectError(f"{where} is selected and runs under autocast, which protect does not know")
        for value in _tensors(self._torch, context.get_inputs()):
            if value.device.type != "cpu" or value.layout != self._torch.strided:
                raise ProtectError(
                    f"{where} is given a tensor on {value.device} with layout {value.layout}; protect runs "
                    "ops on dense tensors of the CPU"
                )
            path = None if self.held(value) else _path(self._torch, value)
            if path is None or not value.numel():
                continue
            if self._read_openly.get(id(value)) is value:
                raise ProtectError(
                    f"{where} is selected, and {path} is read by an op that is not: select both"
                )
            self._move(path, value)
        if self._is_secret(context):
            raise ProtectError(
                f"{where} computes a value of protected parameters alone, which would reach this process; "
                "protect modules whose ops read parameters together with activations"
            )

    def _is_secret(self, context: amanda.OpContext) -> bool:
        given = list(_tensors(self._torch, context.get_inputs()))
        return bool(given) and all(self.held(one) for one in given) and not context["in_place"]

    def _move(self, path: str, value: Any) -> None:
        form, content = packed(value)
        if value.untyped_storage().nbytes() != form.size:
            raise ProtectError(
                f"{path} shares its memory with other tensors; protect needs parameters of their own"
            )
        place = self.place("hold", id(value), "parameter", path.rpartition(".")[0], "")
        _, _, size = self.link.call(
            {"kind": "hold", "path": path, "trained": value.requires_grad}, [(form, content)]
        )
        place.add([form], [], size)
        with self._torch.no_grad():
            value.detach().fill_(float("nan") if value.is_floating_point() or value.is_complex() else 0)
        self._stand_ins[value.untyped_storage().data_ptr()] = StandIn(path, value, value.requires_grad)

    def check(self, context: amanda.OpContext) -> None:
        """Raise ProtectError where an op that is not selected reads a stand-in."""
        for value in _tensors(self._torch, context.get_inputs()):
            found = self.held(value)
            if found is not None:
                raise ProtectError(
                    f"{context['type']} at {context.get_source()} in module {context.get_scope()!r} reads "
                    f"{found.path}, which lies in the protected process: select this op too, or leave it out"
                )
            if isinstance(value, self._torch.nn.Parameter):
                self._read_openly[id(value)] = value

    def run(
        self, *inputs: Any, place: Crossed, op: str, in_place: bool, random: bool, key: int, target: Any
    ) -> Any:  # fmt: skip
        """Run an op in the process, as a function that autograd knows.

        target: the stand-in that the op writes; None where it writes none.
        """
        if target is not None:
            inputs = (target, *inputs[1:])
        torch, given, states = self._torch, list[Any](), list[Any]()

        def told(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                stand_in = self.held(value)
                if stand_in is not None:
                    stand_in.check(value, f"{place.type} at {place.source}")
                    states.append(value)
                    return {"held": stand_in.path}
                given.append(value)
                return {"given": len(given) - 1}
            if isinstance(value, slice):
                return {"slice": [value.start, value.stop, value.step]}
            if isinstance(value, tuple):
                return {"tuple": [told(one) for one in value]}
            if isinstance(value, list):
                return [told(one) for one in value]
            if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
                return {"torch": str(value).removeprefix("torch.")}
            if isinstance(value, _PLAIN):
                return value
            raise ProtectError(
                f"{place.type} at {place.source} was given a {type(value).__name__}, which is not sent to "
                "the protected process: tensors, numbers, texts, types and lists of these are"
            )

        header = {"kind": "forward", "op": op, "inputs": [told(one) for one in inputs], "in_place": in_place}
        records = torch.is_grad_enabled() and any(one.requires_grad for one in (*given, *states))
        call = Call(self, place, self.place("backward", key, place.type, place.module, place.source), random)
        header |= {"trained": [one.requires_grad for one in given], "records": records, "random": random}
        made = _function().apply(call, header, len(given), *given, *states)
        return inputs[0] if call.is_held else made if call.several else made[0]

    def number(self) -> int:
        """Return a number for one more execution."""
        return next(self._numbers)

    def in_pass(self, number: int, paths: Sequence[str]) -> None:
        """Note the parameters that have gradients in a backward pass; these accumulate when it ends."""

        def accumulate() -> None:
            stand_ins = {one.path: one for one in self._stand_ins.values()}
            with self._accumulating:
                fresh = {path: stand_ins[path].is_fresh for path in self._passes.pop(number)}
                self.link.call({"kind": "accumulate", "backward_pass": number, "fresh": fresh})
                for path in fresh:
                    stand_ins[path].give_gradient()

        if number not in self._passes:
            self._torch.autograd.Variable._execution_engine.queue_callback(accumulate)
        self._passes[number] = paths

    def _before_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Step the optimizer's protected parameters in the process."""
        groups = [[one for one in map(self.held, group["params"]) if one] for group in optimizer.param_groups]
        if not any(groups):
            return
        name = type(optimizer).__name__
        if getattr(self._torch.optim, name, None) is not type(optimizer) or any(
            (*args[1:], *kwargs.values())
        ):
            raise ProtectError(
                f"{name} steps protected parameters; the protected process knows the optimizers of "
                "torch.optim, without a closure"
            )
        if optimizer not in self._stepped:
            known = [one.path for group in groups for one in group if optimizer.state.get(one.tensor)]
            if known:
                raise ProtectError(
                    f"{name} has stepped {known[0]} before it was protected; apply the tool earlier"
                )
            self._stepped[optimizer] = len(self._stepped)
        told = [self._group(*one) for one in zip(optimizer.param_groups, groups, strict=True)]
        header = {"kind": "step", "optimizer": self._stepped[optimizer], "name": name, "groups": told}
        _, _, size = self.link.call(header)
        self.place("optimizer", self._stepped[optimizer], name, "", "").add([], [], size)

    def _group(self, group: Mapping[str, Any], stand_ins: Sequence[StandIn]) -> Mapping[str, Any]:
        for one in stand_ins:
            if one.tensor.grad is not None and one.is_fresh:
                raise ProtectError(
                    f"the gradient of {one.path} was written between the backward pass and the step, as "
                    "clipping and scaling do; it lies in the protected process, so protect cannot follow that"
                )
        options = {key: value for key, value in group.items() if key != "params"}
        for key, value in options.items():
            if not all(isinstance(one, _PLAIN) for one in (value if isinstance(value, tuple) else (value,))):
                raise ProtectError(
                    f"option {key} of an optimizer is {value!r}; protect sends numbers and texts"
                )
        gradients = [one.tensor.grad is not None for one in stand_ins]
        return {"options": options, "paths": [one.path for one in stand_ins], "gradients": gradients}

    def release(self) -> None:
        """Bring the values back, and end the process.  Raises ProtectError where it is gone already."""
        try:
            with amanda.disabled(), self._torch.no_grad():
                for one in self._stand_ins.values():
                    _, tensors, _ = self.link.call({"kind": "read", "path": one.path})
                    one.tensor.detach().copy_(unpacked(*tensors[0]))
                    one.tensor.grad = None
        finally:
            self._stand_ins.clear()
            if self._hook is not None:
                self._hook.remove()
                self.link.close()


@dataclass(eq=False)
class Call:
    """One execution of a protected op.  several: outputs; is_held: the output is a stand-in."""

    protection: Protection
    place: Crossed
    backward: Crossed
    random: bool
    number: int = -1
    several: bool = False
    is_held: bool = False

    def forward(self, header: dict[str, Any], given: Sequence[Any]) -> tuple[Any, ...]:
        """Return the outputs."""
        import torch

        protection = self.protection
        self.number = protection.number()
        dropped, protection.dropped = protection.dropped, []
        tensors = [packed(one) for one in given]
        if self.random:
            tensors.append(packed(torch.get_rng_state()))
        header = {**header, "number": self.number, "dropped": dropped}
        answer, made, size = protection.link.call(header, tensors)
        self.place.add([form for form, _ in tensors], [form for form, _ in made], size)
        outputs = [unpacked(*one) for one in made]
        if self.random:
            torch.set_rng_state(outputs.pop())
        self.several, self.is_held = answer["several"], answer["held"]
        return tuple(outputs)

    def gradients(self, gradients: Sequence[Any]) -> Iterator[Any]:
        """Yield the gradients of what was given that needs one."""
        import torch

        protection = self.protection
        there = [i for i, one in enumerate(gradients) if one is not None]
        tensors = [packed(gradients[i]) for i in there]
        now = torch._C._current_graph_task_id()
        header = {"kind": "backward", "number": self.number, "outputs": there, "backward_pass": now}
        answer, made, size = protection.link.call(header, tensors)
        self.backward.add([form for form, _ in tensors], [form for form, _ in made], size)
        protection.in_pass(now, answer["parameters"])
        found = iter(made)
        for is_there in answer["there"]:
            yield unpacked(*next(found)) if is_there else None

    def __del__(self) -> None:
        self.protection.dropped.append(self.number)


@cache
def _function() -> Any:
    """Return the autograd function of a protected op."""
    import torch

    class Protected(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Call, header: dict[str, Any], count: int, *tensors: Any) -> Any:
            ctx.call, ctx.count = call, count
            ctx.wanted = header["trained"]
            outputs = call.forward(header, tensors[:count])
            ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point()))
            ctx.set_materialize_grads(False)
            return outputs

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *gradients: Any) -> Any:
            with amanda.disabled():
                found = list(ctx.call.gradients(gradients))[::-1]
            made = [found.pop() if is_wanted else None for is_wanted in ctx.wanted]
            return None, None, None, *made, *[None] * (len(ctx.needs_input_grad) - 3 - len(made))

    return Protected


def rule(context: amanda.OpContext) -> None:
    """Put a function that makes a Protection into a context."""
    context["protection"] = Protection


def callable_of(context: amanda.OpContext) -> str:
    """Return the path in torch of what an op calls.  Raises ProtectError for what is not torch's own."""
    import torch

    op, name = context.get_op(), getattr(context.get_op(), "__name__", "")
    for owner in _OWNERS:
        space = attrgetter(owner.removeprefix("torch."))(torch) if owner != "torch" else torch
        if getattr(space, name, None) is op:
            return f"{owner}.{name}"
    raise ProtectError(
        f"{context['type']} at {context.get_source()} calls {name or op!r}, which protect does not find in "
        "torch; it runs ops of torch itself"
    )


def is_random(context: amanda.OpContext) -> bool:
    """Return True for an op that may draw random numbers."""
    import torch

    packet = getattr(torch.ops.aten, context.get_op_type(), None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)


def _tensors(torch: Any, values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(torch, value)


def _path(torch: Any, value: Any) -> str | None:
    """Return the path of a parameter or buffer in the outermost model that is being called."""
    modules = [one for one in interceptor.subjects() if isinstance(one, torch.nn.Module)]
    for name, one in _named(modules[:1]):
        if one is value:
            return name
    if isinstance(value, torch.nn.Parameter):
        raise ToolError("protect found a parameter that is in no model which is being called")
    return None


def _named(roots: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for root in roots:
        yield from root.named_parameters()
        yield from root.named_buffers()
