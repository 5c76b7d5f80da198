"""Stand-ins of PyTorch: tensors of the program whose values are in the protected process."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import amanda
from amanda import interceptor
from amanda.errors import ToolError
from amanda.tools.kit import torch_tensors
from amanda.tools.partition._enclave import ProtectError, RawBytes, TensorHeader, pack_tensor

_NAMESPACE_PATHS = (
    "torch", "torch._C._nn", "torch.Tensor", "torch._C._linalg", "torch._C._special", "torch._C._fft"
)  # fmt: skip
PLAIN_TYPES = (int, float, bool, str, type(None))
"""Types of values that are sent as they are."""

HoldTensor = Callable[[str, Any, TensorHeader, RawBytes], None]
"""Function that sends a tensor to the process, from its path, the tensor, its header and its bytes."""


@dataclass(eq=False)
class ParameterStandIn:
    """A tensor of the program whose values lie in the protected process; NaN is in their place.

    trained: `requires_grad` of the tensor when it was moved.
    gradient, version: the NaN that stands for its gradient, and autograd's version of it when it was filled.
    """

    path: str
    tensor: Any
    trained: bool
    gradient: Any = None
    version: int = 0

    def check(self, value: Any, op_text: str) -> None:
        """Raise ProtectError for a view of the stand-in, and where `requires_grad` was changed since."""
        if value.shape != self.tensor.shape or value.stride() != self.tensor.stride():
            raise ProtectError(f"{op_text} reads a view of {self.path}; protect knows whole parameters")
        if self.tensor.requires_grad != self.trained:
            raise ProtectError(
                f"{op_text} reads {self.path}, whose requires_grad was changed after it was protected: "
                "freeze parameters before, or finalize and protect anew"
            )

    @property
    def is_gradient_replaced(self) -> bool:
        """Return True if the program has dropped, replaced or written the gradient since it was filled."""
        grad = self.tensor.grad
        # A new version tells that `zero_` or clipping has written into it.
        return grad is None or grad is not self.gradient or grad._version != self.version

    def fill_gradient(self) -> None:
        """Give the program's tensor a gradient of NaN, in the memory of its gradient if it has one."""
        import torch

        with amanda.disabled(), torch.no_grad():
            if self.tensor.grad is None:
                self.tensor.grad = torch.full_like(self.tensor, float("nan"))
            else:
                self.tensor.grad.fill_(float("nan"))
        # The version after the fill, so that this write does not count as the program's.
        self.gradient, self.version = self.tensor.grad, self.tensor.grad._version


class ParameterStandIns:
    """The stand-ins of a program, and the parameters that its other ops have read."""

    def __init__(self) -> None:
        # By address of the memory, so that `find` returns a stand-in for its views too.
        self._by_address: dict[int, ParameterStandIn] = {}
        # Weak: parameters of a model that is gone must not be kept.
        self._read_outside_selection: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[ParameterStandIn]:
        return iter(self._by_address.values())

    def clear(self) -> None:
        """Forget all stand-ins."""
        self._by_address.clear()

    def find(self, value: Any) -> ParameterStandIn | None:
        """Return the stand-in in whose memory a value lies; None for other values."""
        return self._by_address.get(value.untyped_storage().data_ptr())

    def are_read_by(self, context: amanda.OpContext) -> bool:
        """Return True if an op reads a stand-in, or a parameter or buffer, which may become one."""
        return any(
            self.find(value) is not None or parameter_path(value) is not None
            for value in torch_tensors(context.get_inputs())
        )

    def adopt(self, context: amanda.OpContext, hold: HoldTensor) -> None:
        """Move the parameters and buffers that a selected op reads to the process by `hold`.

        Parameters that were moved before stay there.  Raises ProtectError under autocast, for a tensor off
        the CPU or not dense, a parameter that an op outside the selection has read or that shares its memory,
        and an op that reads parameters alone.
        """
        import torch

        op_text = f"{context['type']} at {context.get_source()}"
        if torch.is_autocast_enabled("cpu"):
            raise ProtectError(f"{op_text} is selected and runs under autocast, which protect does not know")
        for value in torch_tensors(context.get_inputs()):
            # Bytes are sent as they lie in memory.
            if value.device.type != "cpu" or value.layout != torch.strided:
                raise ProtectError(
                    f"{op_text} is given a tensor on {value.device} with layout {value.layout}; protect runs "
                    "ops on dense tensors of the CPU"
                )
            if self.find(value) is not None:
                continue  # moved before
            path = parameter_path(value)
            if path is None or not value.numel():
                continue
            # An id alone may be that of a tensor that is gone.
            if self._read_outside_selection.get(id(value)) is value:
                raise ProtectError(
                    f"{op_text} is selected, and {path} is read by an op that is not: select both"
                )
            self.move_to_process(path, value, hold)
        if self._computes_from_parameters_alone(context):
            raise ProtectError(
                f"{op_text} computes a value of protected parameters alone, which would reach this process; "
                "protect modules whose ops read parameters together with activations"
            )

    def move_to_process(self, path: str, value: Any, hold: HoldTensor) -> None:
        """Send a tensor to the process; make the one here a stand-in, filled with NaN, of integers with 0.

        If `hold` raises, the tensor here keeps its values.
        Raises ProtectError for a tensor that shares its memory with others.
        """
        import torch

        header, content = pack_tensor(value)
        # NaN would be written over its neighbours, and views of it would stay readable.
        if value.untyped_storage().nbytes() != header.size:
            raise ProtectError(
                f"{path} shares its memory with other tensors; protect needs parameters of their own"
            )
        # First: if the process refuses, the values are still here.
        hold(path, value, header, content)
        # NaN shows in results if an op reads the stand-in unseen; buffers of integers have no NaN.
        with torch.no_grad():
            value.detach().fill_(float("nan") if value.is_floating_point() or value.is_complex() else 0)
        self._by_address[value.untyped_storage().data_ptr()] = ParameterStandIn(
            path, value, value.requires_grad
        )

    def record_open_reads(self, context: amanda.OpContext) -> None:
        """Record the parameters that an unselected op reads; raise ProtectError where it reads a stand-in."""
        import torch

        for value in torch_tensors(context.get_inputs()):
            stand_in = self.find(value)
            if stand_in is not None:
                raise ProtectError(
                    f"{context['type']} at {context.get_source()} in module {context.get_scope()!r} reads "
                    f"{stand_in.path}, which lies in the protected process: select this op too, or leave it "
                    "out"
                )
            if isinstance(value, torch.nn.Parameter):
                self._read_outside_selection[id(value)] = value

    def _computes_from_parameters_alone(self, context: amanda.OpContext) -> bool:
        """Return True if all tensors that an op reads are stand-ins, and its result is a new tensor."""
        inputs = torch_tensors(context.get_inputs())
        # An op in place gives back the stand-in, whose values stay in the process.
        return bool(inputs) and all(map(self.find, inputs)) and not context["in_place"]


class ProtectedOptimizers:
    """The optimizers that have stepped stand-ins, numbered in the order of their first step."""

    def __init__(self, stand_ins: ParameterStandIns) -> None:
        self._stand_ins = stand_ins
        self._numbers = itertools.count()
        self._number_by_optimizer: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def step_message(
        self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Return the message that steps an optimizer's protected parameters; None where it has none.

        args, kwargs: of its `step`.  Numbers an optimizer at its first step.  Raises ProtectError for one
        that the process does not know or that has stepped before, and for gradients that the program wrote.
        """
        stand_ins_by_group = [
            [stand_in for stand_in in map(self._stand_ins.find, group["params"]) if stand_in]
            for group in optimizer.param_groups
        ]
        if not any(stand_ins_by_group):
            return None
        import torch

        name = type(optimizer).__name__
        # A subclass, or a step with a closure, may read the parameters in the program.
        if getattr(torch.optim, name, None) is not type(optimizer) or any((*args[1:], *kwargs.values())):
            raise ProtectError(
                f"{name} steps protected parameters; the protected process knows the optimizers of "
                "torch.optim, without a closure"
            )
        if optimizer not in self._number_by_optimizer:
            all_stand_ins = [stand_in for stand_ins in stand_ins_by_group for stand_in in stand_ins]
            _check_not_stepped(optimizer, all_stand_ins)
            self._number_by_optimizer[optimizer] = next(self._numbers)
        group_messages = [
            _describe_group(group, stand_ins)
            for group, stand_ins in zip(optimizer.param_groups, stand_ins_by_group, strict=True)
        ]
        number = self._number_by_optimizer[optimizer]
        return {"kind": "step", "optimizer": number, "name": name, "groups": group_messages}


def _check_not_stepped(optimizer: Any, stand_ins: Sequence[ParameterStandIn]) -> None:
    """Raise ProtectError for an optimizer with state of a parameter, such as momentum, from the program.

    The state would be lost: the process starts with an optimizer of its own.
    """
    stepped_paths = [stand_in.path for stand_in in stand_ins if optimizer.state.get(stand_in.tensor)]
    if stepped_paths:
        raise ProtectError(
            f"{type(optimizer).__name__} has stepped {stepped_paths[0]} before it was protected; apply the "
            "tool earlier"
        )


def _describe_group(group: Mapping[str, Any], stand_ins: Sequence[ParameterStandIn]) -> Mapping[str, Any]:
    """Return the message of a parameter group: options, paths of its stand-ins, and which have gradients.

    Raises ProtectError for a gradient that the program has written, and for an option that cannot be sent.
    """
    for stand_in in stand_ins:
        if stand_in.tensor.grad is not None and stand_in.is_gradient_replaced:
            raise ProtectError(
                f"the gradient of {stand_in.path} was written between the backward pass and the step, as "
                "clipping and scaling do; it lies in the protected process, so protect cannot follow that"
            )
    options = {key: value for key, value in group.items() if key != "params"}
    for key, value in options.items():
        # Adam's betas are a tuple.
        items = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(item, PLAIN_TYPES) for item in items):
            raise ProtectError(f"option {key} of an optimizer is {value!r}; protect sends numbers and texts")
    gradients = [stand_in.tensor.grad is not None for stand_in in stand_ins]
    return {"options": options, "paths": [stand_in.path for stand_in in stand_ins], "gradients": gradients}


def find_callable_path(context: amanda.OpContext) -> str:
    """Return the path of an op's callable, such as "torch.matmul".

    Raises ProtectError for a callable that is not of torch.
    """
    import torch

    op, name = context.get_op(), getattr(context.get_op(), "__name__", "")
    # By name, looked up again in the process: no function is sent.
    for namespace_path in _NAMESPACE_PATHS:
        is_torch = namespace_path == "torch"
        namespace = torch if is_torch else attrgetter(namespace_path.removeprefix("torch."))(torch)
        if getattr(namespace, name, None) is op:
            return f"{namespace_path}.{name}"
    raise ProtectError(
        f"{context['type']} at {context.get_source()} calls {name or op!r}, which protect does not find in "
        "torch; it runs ops of torch itself"
    )


def is_random(context: amanda.OpContext) -> bool:
    """Return True for an op that may draw random numbers."""
    import torch

    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(context))


def shares_memory(context: amanda.OpContext) -> bool:
    """Return True for an op whose result may be a view of an input, and for a write by index."""
    # No operator of ATen has these names; both reach the memory of a tensor.
    if context.get_op_type() in ("getitem", "setitem"):
        return True
    aliases = [result.alias_info for overload in _overloads(context) for result in overload._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _overloads(context: amanda.OpContext) -> list[Any]:
    """Return the overloads of ATen's operator of this name; none for an op that is not of ATen."""
    import torch

    packet = getattr(torch.ops.aten, context.get_op_type(), None)
    return [] if packet is None else [getattr(packet, name) for name in packet.overloads()]


def parameter_path(value: Any) -> str | None:
    """Return the path of a parameter or buffer in the outermost model that is being called.

    None for another tensor.  Raises ToolError for a parameter that is not of the model.
    """
    import torch

    # The modules that are being called, the outermost first.
    modules = (module for module in interceptor.subjects() if isinstance(module, torch.nn.Module))
    model = next(modules, None)
    if model is not None:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor is value:
                return str(name)
    if isinstance(value, torch.nn.Parameter):
        raise ToolError("protect found a parameter that is in no model which is being called")
    return None
