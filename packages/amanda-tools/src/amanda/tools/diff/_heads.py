"""What a module gives: the outputs of the ops that end it."""

from __future__ import annotations

from collections.abc import Sequence

from amanda.tools.diff._align import is_compute
from amanda.tools.diff._run import Run
from amanda.tools.dump import Entry

_READS = frozenset({"ReadVariableOp", "Const", "Shape", "StopGradient", "VarHandleOp"})
_SUMS = ("add", "BiasAdd")


def heads(run: Run, visit: Sequence[int]) -> list[Entry]:
    """Return what the last op gave, and what the last product gave with its bias."""
    shown = [i for i in visit if run.ops[i].type not in _READS]
    ends = {shown[-1]} if shown else set()
    own = min((run.ops[i].module for i in shown), key=len, default="")  # a product of a child is the child's
    products = [n for n, i in enumerate(shown) if is_compute(run.ops[i].type) and run.ops[i].module == own]
    if products:
        ends.add(_behind(run, shown[products[-1] :]))
    return [
        entry for i in sorted(ends) for entry in run.by_op[i]
        if entry.role == "output" and entry.position == 0
    ]  # fmt: skip


def _behind(run: Run, ops: Sequence[int]) -> int:
    """Return the last op of a product with its bias: ops that add to it or shape it, and keep its size."""
    found, size = ops[0], _size(run, ops[0])
    for index in ops[1:]:
        kind = run.ops[index].type
        if _size(run, index) != size:
            continue
        if kind not in (*_SUMS, "reshape", "squeeze"):
            break
        found = index
        if kind in _SUMS:
            break
    return found


def _size(run: Run, index: int) -> int:
    outputs = [one for one in run.by_op[index] if one.role == "output"]
    return outputs[0].summary.statistics.elements
