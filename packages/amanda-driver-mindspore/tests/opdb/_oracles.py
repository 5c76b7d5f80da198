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
        return type(value)([_copied(element) for element in value])
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
        return [facts(element) for element in value]
    return value if isinstance(value, (int, float, str, bool)) else type(value).__name__


def call_record(function: Routine, arguments: Callable[[], list[Any]]) -> dict[str, Any]:
    """Return what a call gives and makes of its arguments, and the gradients of its sum; or its error."""
    ms.set_seed(1)
    values = arguments()
    try:
        result = function(*values)
        record = {"result": facts(result), "arguments": facts(values), "gradients": None}
    except Exception as error:
        return {"error": type(error).__name__}
    floats = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.dtype in FLOATING]
    if floats:
        try:
            gradient = ms.grad(lambda *values: _total(function(*values)), tuple(floats))
            record["gradients"] = facts(gradient(*arguments()))
        except Exception as error:
            record["gradients"] = type(error).__name__
    return record


FLOATING = (ms.float16, ms.float32, ms.float64)


def _total(result: Any) -> Any:
    floating = [output for output in _tensors(result) if output.dtype in FLOATING]
    total = floating[0].sum()
    for output in floating[1:]:
        total = total + output.sum()
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element)


def differences(programs: Mapping[str, Callable[[], Any]], oracle: str) -> dict[str, str]:
    """Return how records of programs differ under an oracle, in its first and second run; by their names.

    Opening a scope takes longer than a call, so all programs run in one.  What differs in itself is left out.
    """
    bare = {name: record() for name, record in programs.items()}
    again = {name: record() for name, record in programs.items()}
    with amanda.apply(ORACLES[oracle]()):
        runs = [{name: record() for name, record in programs.items()} for _ in range(2)]
    after = {name: record() for name, record in programs.items()}
    messages = {}
    for name, expected in bare.items():
        if again[name] == expected:
            for when, records in (("first", runs[0]), ("second", runs[1]), ("after", after)):
                if records[name] != expected:
                    messages.setdefault(name, f"{when}: {_apart(records[name], expected)}")
    return messages


def _apart(record: Any, expected: Any) -> str:
    if not (isinstance(record, dict) and isinstance(expected, dict)):
        return "values"
    keys = sorted(key for key in record.keys() | expected.keys() if record.get(key) != expected.get(key))
    return ", ".join(f"{key} {record[key]}" if isinstance(record.get(key), str) else key for key in keys)
