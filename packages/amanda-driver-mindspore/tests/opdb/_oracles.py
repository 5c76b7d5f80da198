"""Tools that change nothing, and a record of all that a call or a program computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mindspore as ms
from mindspore import Tensor

import amanda

Routine = Callable[..., Any]


class Everywhere(amanda.Tool):
    """A routine before and after every op, forward and backward; None for analyses that only look."""

    def __init__(self, routine: Routine | None) -> None:
        self._routine = routine
        for backward in (False, True):
            self.add_inst_for_op(self._before, backward=backward)
            self.add_inst_for_op(self._after, backward=backward, require_outputs=True)

    def _before(self, context: amanda.OpContext) -> None:
        self._insert(context, "before")

    def _after(self, context: amanda.OpContext) -> None:
        self._insert(context, "after")

    def _insert(self, context: amanda.OpContext, side: str) -> None:
        if self._routine is not None:
            op = "op" if context.is_forward() else "backward_op"
            getattr(context, f"insert_{side}_{op}")(self._routine)


def echo(*values: Any) -> Any:
    """Return the same objects."""
    return list(values)


def equal(*values: Any) -> Any:
    """Return equal tensors in memory of their own."""
    return [_copied(value) for value in values]


@amanda.traceable
def traceable(*values: Any) -> Any:
    """Return equal tensors, as code that a graph could have."""
    return [_copied(value) for value in values]


def _copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_copied(one) for one in value])
    return value.copy() if isinstance(value, Tensor) else value


ORACLES: Mapping[str, Callable[[], amanda.Tool]] = {
    "look": lambda: Everywhere(None),
    "echo": lambda: Everywhere(echo),
    "equal": lambda: Everywhere(equal),
    "traceable": lambda: Everywhere(traceable),
}


def facts(value: Any) -> Any:
    """Return what a value holds, bit by bit."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.asnumpy().tobytes()
    if isinstance(value, (list, tuple)):
        return [facts(one) for one in value]
    return value if isinstance(value, (int, float, str, bool)) else type(value).__name__


def call_record(function: Routine, arguments: Callable[[], list[Any]]) -> dict[str, Any]:
    """Return what a call gives and makes of its arguments, and the gradients of its sum; or its error."""
    ms.set_seed(1)
    given = arguments()
    try:
        result = function(*given)
        record = {"result": facts(result), "arguments": facts(given), "gradients": None}
    except Exception as error:
        return {"error": type(error).__name__}
    floats = [i for i, one in enumerate(given) if isinstance(one, Tensor) and one.dtype in FLOATING]
    if floats:
        try:
            gradient = ms.grad(lambda *values: _total(function(*values)), tuple(floats))
            record["gradients"] = facts(gradient(*arguments()))
        except Exception as error:
            record["gradients"] = type(error).__name__
    return record


FLOATING = (ms.float16, ms.float32, ms.float64)


def _total(result: Any) -> Any:
    floating = [one for one in _tensors(result) if one.dtype in FLOATING]
    total = floating[0].sum()
    for one in floating[1:]:
        total = total + one.sum()
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def differences(programs: Mapping[str, Callable[[], Any]], oracle: str) -> dict[str, str]:
    """Return how records of programs differ under an oracle, in its first and second run; by their names.

    Opening a scope takes longer than a call, so all programs run in one.  What differs in itself is left out.
    """
    bare = {name: record() for name, record in programs.items()}
    again = {name: record() for name, record in programs.items()}
    with amanda.apply(ORACLES[oracle]()):
        runs = [{name: record() for name, record in programs.items()} for _ in range(2)]
    after = {name: record() for name, record in programs.items()}
    found = {}
    for name, wanted in bare.items():
        if again[name] == wanted:
            for when, records in (("first", runs[0]), ("second", runs[1]), ("after", after)):
                if records[name] != wanted:
                    found.setdefault(name, f"{when}: {_apart(records[name], wanted)}")
    return found


def _apart(one: Any, other: Any) -> str:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return "values"
    keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
    return ", ".join(f"{key} {one[key]}" if isinstance(one.get(key), str) else key for key in keys)
