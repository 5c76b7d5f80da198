"""Parts of parameters, of which an op may read another each time: its id does not tell them apart.

So the experts of a mixture, which are parts of one parameter and go by the data, are read in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import prod
from typing import TYPE_CHECKING, Any

import amanda
from amanda import interceptor
from amanda.tools.weights._parameters import StridedLayout

if TYPE_CHECKING:
    from amanda.tools.weights._parameter_slices import ParameterSlice


def may_vary(context: amanda.OpContext, index: int) -> bool:
    """Return True if an eager op of PyTorch may read another weight at its next execution."""
    if not context.namespace.matches("pytorch/*/eager") or context.get_variable(index) is None:
        return False
    import torch

    return not isinstance(context.get_inputs()[index], torch.nn.Parameter)


def is_adapter(context: amanda.OpContext) -> bool:
    """Return True if the op is one of a LoRA adapter of peft, which is trained beside the model's weights."""
    return any(part.startswith("lora_") for path in context.get_scopes() for part in path.split("."))


def in_memory_order(form: StridedLayout) -> tuple[int, ...]:
    """Return the axes of a part in memory order, which is the same for all of its forms."""
    extents, strides, _ = form
    return tuple(sorted(range(len(extents)), key=lambda axis: (extents[axis] == 1, -strides[axis])))


class SharedState:
    """The place that state of a part is kept under, whichever op of it happens to read the part first.

    A parameter whose path in the model is known needs no more than the part.
    """

    def __init__(self) -> None:
        self._readers: dict[Hashable, amanda.OpContext] = {}
        self._holders: dict[amanda.OpContext, list[Hashable]] = {}
        self._lines: dict[Hashable, list[Hashable]] = {}
        self._states: dict[Hashable, Any] = {}

    def state_of(
        self,
        context: amanda.OpContext,
        part: ParameterSlice | None,
        make: Callable[[amanda.OpContext, str], Any],
        line: Hashable = None,
    ) -> Any:
        """Return the state of a part of a parameter, from `make(reader, suffix)` at its first reader.

        reader, suffix: see `key_for`.  line: of the op, where each line that reads the part has state of its
        own; the suffix of all lines but the first has the line's number.
        Returns None for what is no part: what was computed, or selected.
        """
        if part is None or part.form is None:
            return None
        identity, form = interceptor.ordinal(part.holder), part.form
        reader, suffix = self.key_for(context, identity, form, StridedLayout.of(part.holder))
        if line is not None:
            lines = self._lines.setdefault((reader, identity), [])
            if line not in lines:
                lines.append(line)
            suffix += f"~{number}" if (number := lines.index(line)) else ""
        key = reader, identity, form, line
        if key not in self._states:
            self._states[key] = make(reader, suffix)
        return self._states[key]

    def key_for(
        self,
        context: amanda.OpContext,
        identity: Hashable,
        part: StridedLayout | None,
        whole: StridedLayout,
        is_named: bool = False,
    ) -> tuple[amanda.OpContext, str]:
        """Return the context of the first reader of the parameter's parts, and a suffix for names of state.

        identity: of the parameter; is_named: whether names of state have its path.
        part: the form that is read, None for all of it.  whole: its own form.
        """
        is_part = part is not None and prod(part.extents) < prod(whole.extents)
        reader = self._readers.setdefault(identity, context) if is_part else context
        holders = self._holders.setdefault(reader, [])
        if identity not in holders:
            holders.append(identity)
        number = 0 if is_named else holders.index(identity)
        offset = f"@{part.offset}" if is_part and part is not None else ""
        return reader, offset + (f"#{number}" if number else "")
