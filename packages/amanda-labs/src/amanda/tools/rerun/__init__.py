"""Facts of ops of PyTorch's eager mode that may run again, and calls that the program does not see."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import amanda

__all__ = ["Rerun", "rerun", "undisturbed"]


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
"""Positions of the running mean and variance among the inputs of a normalization."""
_NATIVE = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.GetSetDescriptorType,
)  # fmt: skip


def rerun(context: amanda.OpContext) -> None:
    """Write the `Rerun` of an op into its context as `rerun`: a rule for PyTorch's eager mode."""
    context["rerun"] = _rerun_facts(context)


def _rerun_facts(context: amanda.OpContext) -> Rerun:
    """Return the `Rerun` of an op, by its inputs and the schemas of its overloads.

    An op in place, with `out`, in Python, or without a schema is not pure.  If an overload may write any
    input, or the op writes lists, `written` is None.  A normalization in training writes its running
    statistics, as scratch.
    """
    import torch

    inputs, name = context.get_inputs(), context.get_op_type()
    if context["in_place"]:
        # `_fused_adam_` and its like write several lists.
        return Rerun(written=None if name.startswith("_fused") else (0,))
    out_positions = tuple(i for i, value in enumerate(inputs) if _is_out_argument(context, value))
    if out_positions:
        return Rerun(written=out_positions)
    # A Python function may have side effects.  `_descriptor`: of a read of a property such as `mT`.
    is_native = isinstance(context.get_op(), _NATIVE) or hasattr(context.get_op(), "_descriptor")
    operator = torch.ops.aten.index if name == "getitem" else getattr(torch.ops.aten, name, None)
    if operator is None or not is_native:
        return Rerun()
    overloads = [getattr(operator, overload) for overload in operator.overloads()]
    schemas = [overload._schema for overload in overloads]
    writing_schemas = [schema for schema in schemas if schema.is_mutable]
    # An overload that writes anything but `out` may write any input.
    if any(not any(argument.is_out for argument in schema.arguments) for schema in writing_schemas):
        return Rerun(written=None)
    # PyTorch tags the overloads that draw random numbers.
    is_random = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    has_generator = any(isinstance(value, torch.Generator) for value in inputs)
    # Input 5 is the flag of training: with it a normalization writes running averages that its outputs do
    # not depend on.
    is_training = context["type"] in ("batch_norm", "instance_norm") and len(inputs) > 5 and bool(inputs[5])
    scratch = tuple(i for i in _STATISTICS if inputs[i] is not None) if is_training else ()
    return Rerun(written=scratch, pure=True, random=is_random or has_generator, scratch=scratch)


def _is_out_argument(context: amanda.OpContext, value: Any) -> bool:
    """Return True for the tensor that is given as `out`; False for an op without that argument."""
    try:
        return value is not None and context.get_value("out") is value
    except amanda.AmandaError:
        return False


@contextmanager
def undisturbed() -> Iterator[None]:
    """Return a context without gradients, in which the user's modes and tensor subclasses see no calls."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as stack:
        # Leaving modes costs some microseconds, and nearly always there is none.
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        yield
