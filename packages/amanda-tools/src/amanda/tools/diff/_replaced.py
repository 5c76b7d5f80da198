"""A run in which one op gives what it gave in another run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.diff._run import OUTPUT_ROLES
from amanda.tools.dump import Dump, Entry, Op
from amanda.tools.kit import op_tensors, tensors_of
from amanda.tools.mapping import StandardMapping

if TYPE_CHECKING:
    from numpy.typing import NDArray

Place = tuple[str, str, str, str, int]
"""Phase, type, module and line of an op, and its number among those that are equal in these."""


def place(ops: Sequence[Op], index: int) -> Place:
    """Return the place of an op of a dump; a run of the same program has the same places."""
    told = _place_of_line(ops[index])
    return (*told, sum(_place_of_line(one) == told for one in ops[:index]))


def _place_of_line(op: Op) -> tuple[str, str, str, str]:
    return op.phase, op.type, op.module, op.source


class ReplacedTool(amanda.Tool):
    """Gives what an op of one run gave, or its gradients, in place of what an op gives in another.

    source, op: folder of a dump with full tensors, and the index of an op in it.  target, other: folder of a
    dump of the program that is run now, and the index of the op in it whose values are replaced.

    replaced: how many executions had their values replaced.  left: why others had not.
    """

    def __init__(self, source: Path, op: int, target: Path, other: int) -> None:
        super().__init__()
        self.replaced = 0
        self.left: set[str] = set()
        self._dump = Dump(source)
        self._values: dict[int, list[Entry]] = {}
        for entry in self._dump:
            if entry.op == op and entry.role in OUTPUT_ROLES:
                self._values.setdefault(entry.execution, []).append(entry)
        self._place = place(Dump(target).ops, other)
        self._met: dict[tuple[int, int | None], Place] = {}
        self._counts: Counter[tuple[str, str, str, str]] = Counter()
        self._executed = 0
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._forward)
        self.add_inst_for_op(self._backward, backward=True)

    def _forward(self, context: amanda.OpContext) -> None:
        if self._is_there(context, context["phase"], context["type"]):
            context.insert_after_op(self._give, dtype=context["dtype"])

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        if kind != "accumulate_grad" and self._is_there(context, "backward", kind):
            context.insert_after_backward_op(self._give, dtype=context["dtype"])

    def _is_there(self, context: amanda.OpContext, phase: str, kind: str) -> bool:
        key = context.get_op_id(), context.get_backward_op_id()
        if key not in self._met:
            told = phase, kind, context.get_scope(), context.get_source()
            self._met[key] = (*told, self._counts[told])
            self._counts[told] += 1
        return self._met[key] == self._place

    def _give(self, *values: Any, dtype: Any) -> list[Any] | None:
        entries = self._values.get(self._executed, [])
        self._executed += 1
        own = list(op_tensors(values, dtype))
        given = [(one, self._dump.array(entry)) for one, entry in zip(own, entries, strict=False)]
        if len(own) != len(entries) or any(one.position != one.flat_index for one in own):
            self.left.add("it gives other tensors than in a, or lists")
        elif any(array is None or array.shape != tuple(one.tensor.shape) for one, array in given):
            self.left.add("it gives tensors of other shapes than in a")
        else:
            changed = list(values)
            for one, array in given:
                changed[one.position] = _cast(array, one.tensor)
            self.replaced += 1
            return changed
        return None


def _cast(array: NDArray[Any] | None, like: Any) -> Any:
    """Return numbers as a tensor like another; NumPy's own types hold those of every other exactly."""
    assert array is not None
    plain = array if array.dtype.isbuiltin == 1 else array.astype("float32")
    return tensors_of(like).cast(plain.copy(), like)
