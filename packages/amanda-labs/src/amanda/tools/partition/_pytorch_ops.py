"""Facts of PyTorch's ops and parameters that protected parts need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import amanda
from amanda import interceptor
from amanda.errors import ToolError
from amanda.tools.kit import leaves
from amanda.tools.partition._channel import ProtectError

_OWNERS = ("torch", "torch._C._nn", "torch.Tensor", "torch._C._linalg", "torch._C._special", "torch._C._fft")
PLAIN = (int, float, bool, str, type(None))
"""Types of values that are sent as they are."""


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

    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(context))


def shares_memory(context: amanda.OpContext) -> bool:
    """Return True for an op whose result may be a view of an input, and for a write by index."""
    if context.get_op_type() in ("getitem", "setitem"):
        return True
    aliases = [result.alias_info for overload in _overloads(context) for result in overload._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _overloads(context: amanda.OpContext) -> list[Any]:
    import torch

    packet = getattr(torch.ops.aten, context.get_op_type(), None)
    return [] if packet is None else [getattr(packet, name) for name in packet.overloads()]


def tensors(values: Sequence[Any]) -> list[Any]:
    """Return the tensors among the inputs of an op, and in its lists."""
    import torch

    return [leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor)]


def path(value: Any) -> str | None:
    """Return the path of a parameter or buffer in the outermost model that is being called."""
    import torch

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
