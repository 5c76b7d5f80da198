"""Which ops of PyTorch may run again, and how, so that the program does not notice."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import amanda


class Rerun(NamedTuple):
    """The facts of an op that say whether it may run again.

    written: positions of the inputs that the op writes; None for all.  pure: whether the op may run again.
    random: whether it may draw random numbers.  scratch: positions that it writes and does not read.
    """

    written: tuple[int, ...] | None = ()
    pure: bool = False
    random: bool = False
    scratch: tuple[int, ...] = ()


_STATISTICS = (3, 4)
_NATIVE = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType,
)  # fmt: skip


def rerun(context: amanda.OpContext) -> None:
    """Put whether an op may run again into its context as `rerun`: a rule for PyTorch's eager mode."""
    context["rerun"] = _rerun(context)


def _rerun(context: amanda.OpContext) -> Rerun:
    """Return whether an op may run again, by the schemas of its overloads."""
    import torch

    inputs, name = context.get_inputs(), context.get_op_type()
    if context["in_place"]:
        return Rerun(None if name.startswith("_fused") else (0,))
    written = tuple(i for i, one in enumerate(inputs) if _is_out(context, one))
    if written:
        return Rerun(written)
    native = isinstance(context.get_op(), _NATIVE) or hasattr(context.get_op(), "_descriptor")
    packet = torch.ops.aten.index if name == "getitem" else getattr(torch.ops.aten, name, None)
    if packet is None or not native:
        return Rerun()
    overloads = [getattr(packet, one) for one in packet.overloads()]
    schemas = [one._schema for one in overloads]
    if any(one.is_mutable and not any(given.is_out for given in one.arguments) for one in schemas):
        return Rerun(None)
    random = any(torch.Tag.nondeterministic_seeded in one.tags for one in overloads)
    trained = context["type"] in ("batch_norm", "instance_norm") and len(inputs) > 5 and bool(inputs[5])
    scratch = tuple(i for i in _STATISTICS if inputs[i] is not None) if trained else ()
    return Rerun(scratch, True, random or any(isinstance(one, torch.Generator) for one in inputs), scratch)


def _is_out(context: amanda.OpContext, value: Any) -> bool:
    try:
        return value is not None and context.get_value("out") is value
    except amanda.AmandaError:
        return False


@contextmanager
def undisturbed() -> Iterator[None]:
    """Return a context that hides calls from the user's modes and tensor subclasses."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        yield
