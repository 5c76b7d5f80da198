"""Parts of parameters, of which an op may read another each time: its id does not tell them apart.

So the experts of a mixture, which are parts of one parameter and go by the data, are read in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import amanda
from amanda import interceptor

if TYPE_CHECKING:
    from torch import Tensor

    from amanda.tools.kit._origins import Origin

Form = tuple[Sequence[int], Sequence[int], int]
"""Extents, strides and offset."""


def form_of(tensor: Tensor) -> Form:
    """Return extents, strides and offset, by which parts of one tensor differ."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def holder_of(weight: Tensor) -> Tensor | None:
    """Return the parameter or leaf that a PyTorch tensor is, or is a view of; None for a computed one."""
    import torch

    base = weight if weight._base is None else weight._base
    return base if isinstance(base, torch.nn.Parameter) or (base.requires_grad and base.is_leaf) else None


def may_vary(context: amanda.OpContext, index: int) -> bool:
    """Return True if an eager op of PyTorch may read another weight at its next execution."""
    if not context.namespace.matches("pytorch/*/eager") or context.get_variable(index) is None:
        return False
    import torch

    return not isinstance(context.get_inputs()[index], torch.nn.Parameter)


def makes_a_weight(context: amanda.OpContext) -> bool:
    """Return True if the op belongs to a parametrization of PyTorch, which computes a weight."""
    return ".parametrizations." in f".{context.get_scope()}."


def is_adapter(context: amanda.OpContext) -> bool:
    """Return True if the op is one of a LoRA adapter of peft, which is trained beside the model's weights."""
    return any(part.startswith("lora_") for path in context.get_scopes() for part in path.split("."))


def in_memory_order(form: Form) -> tuple[int, ...]:
    """Return the axes of a part in memory order, which is the same for all of its forms."""
    extents, strides, _ = form
    return tuple(sorted(range(len(extents)), key=lambda axis: (extents[axis] == 1, -strides[axis])))


class Parts:
    """The place that state of a part is kept under, whichever op of it happens to read the part first.

    A parameter whose path in the model is known needs no more than the part.
    """

    def __init__(self) -> None:
        self._readers: dict[Hashable, amanda.OpContext] = {}
        self._holders: dict[amanda.OpContext, list[Hashable]] = {}
        self._lines: dict[Hashable, list[Hashable]] = {}
        self._kept: dict[Hashable, Any] = {}

    def kept(
        self,
        context: amanda.OpContext,
        origin: Origin | None,
        make: Callable[[amanda.OpContext, str], Any],
        line: Hashable = None,
    ) -> Any:
        """Return what `make(reader, suffix)` made of a part of a parameter, once for all ops that read it.

        reader, suffix: see `place`.  line: of the op, where each line that reads the part has state of its
        own; the suffix of all lines but the first has the line's number.
        Returns None for what is no part: what was computed, or selected.
        """
        if origin is None or origin.form is None:
            return None
        identity, form = interceptor.ordinal(origin.holder), origin.form
        reader, suffix = self.place(context, identity, form, form_of(origin.holder))
        if line is not None:
            lines = self._lines.setdefault((reader, identity), [])
            if line not in lines:
                lines.append(line)
            suffix += f"~{number}" if (number := lines.index(line)) else ""
        key = reader, identity, form, line
        if key not in self._kept:
            self._kept[key] = make(reader, suffix)
        return self._kept[key]

    def place(
        self,
        context: amanda.OpContext,
        identity: Hashable,
        part: Form | None,
        whole: Form,
        is_named: bool = False,
    ) -> tuple[amanda.OpContext, str]:
        """Return the context of the first reader of the parameter's parts, and a suffix for names of state.

        identity: of the parameter; is_named: whether names of state have its path.
        part: the form that is read, None for all of it.  whole: its own form.
        """
        is_part = part is not None and prod(part[0]) < prod(whole[0])
        reader = self._readers.setdefault(identity, context) if is_part else context
        holders = self._holders.setdefault(reader, [])
        if identity not in holders:
            holders.append(identity)
        number = 0 if is_named else holders.index(identity)
        offset = f"@{part[2]}" if is_part and part is not None else ""
        return reader, offset + (f"#{number}" if number else "")
