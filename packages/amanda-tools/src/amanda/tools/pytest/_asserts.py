"""Assertions that run a function under a tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

import amanda
from amanda.errors import OptionError
from amanda.options import Name, NonNegativeFloat, NonNegativeInt, checked
from amanda.tools.mapping import StandardMapping

T = TypeVar("T")
Phase = Literal["forward", "backward"]
Compiled = Literal["eager", "instrument"]
"""As of `amanda.apply`: what becomes of callables that torch.compile made."""


@checked
def assert_flops(
    function: Callable[..., T],
    *inputs: Any,
    macs: NonNegativeInt | None = None,
    flops: NonNegativeInt | None = None,
    rel: NonNegativeFloat = 0.0,
    phase: Name | None = None,
    compiled: Compiled = "eager",
) -> T:
    """Run `function(*inputs)`: it costs so many multiply-accumulates or FLOPs, within `rel` of them.

    phase: one of the words of StandardMapping, "forward" for one; all of them if None.  Gives what the
    function returns.
    Raises AssertionError, with the costliest types of ops, and OptionError where nothing is expected.
    """
    __tracebackhide__ = True
    from amanda.tools.flops import FlopsTool

    expectations = {"macs": macs, "flops": flops}
    if macs is None and flops is None:
        raise OptionError("assert_flops was given nothing to compare with; give macs=... or flops=...")
    tool = FlopsTool()
    with amanda.apply(tool, compiled=compiled):
        output = function(*inputs)
    result = tool.result
    wrong = [
        f"{quantity}: {result.total(quantity, phase):,} counted, {expected:,} expected"
        + (f" within {rel:.2%}" if rel else "")
        for quantity, expected in expectations.items()
        if expected is not None and abs(result.total(quantity, phase) - expected) > rel * expected
    ]
    if wrong:
        raise AssertionError("\n".join([*wrong, str(result.by("phase", "type"))]))
    return output


@checked
def assert_op_counts(
    wanted: Mapping[Name, NonNegativeInt],
    function: Callable[..., T],
    *inputs: Any,
    phase: Phase = "forward",
    exact: bool = False,
    compiled: Compiled = "eager",
) -> T:
    """Run `function(*inputs)`: ops of each type are executed so often, and with `exact` no others.

    Types are words of StandardMapping.  Gives what the function returns; raises AssertionError.
    """
    __tracebackhide__ = True
    tool = Counts()
    with amanda.apply(tool, compiled=compiled):
        output = function(*inputs)
    check_counts(wanted, tool.of(phase), phase, exact)
    return output


@checked
def assert_finite(
    function: Callable[..., T],
    *inputs: Any,
    inf: bool = True,
    backward: bool = True,
    compiled: Compiled = "eager",
) -> T:
    """Run `function(*inputs)`: no op makes NaN or is given any, and none makes Inf unless `inf` is False.

    Gives what the function returns; raises AssertionError, with the op, its line and its inputs.
    """
    __tracebackhide__ = True
    from amanda.tools.nan import NanTool

    tool = NanTool(inf=inf, backward=backward)
    with amanda.apply(tool, compiled=compiled):
        output = function(*inputs)
    if tool.result.entered:
        raise AssertionError(f"NaN comes from {tool.result.entered[0]}")
    if (first := tool.result.first) is not None:
        raise AssertionError(f"the first op that makes {'NaN' if first.makes_nan else 'Inf'} is {first}")
    return output


class Counts(amanda.Tool):
    """Count executions of ops by phase and type."""

    def __init__(self) -> None:
        super().__init__()
        self.executions: Counter[tuple[str, str]] = Counter()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._insert_counter)
        self.add_inst_for_op(self._insert_backward_counter, backward=True)

    def _insert_counter(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._count, inputs=[], op=("forward", context["type"]))

    def _insert_backward_counter(self, context: amanda.OpContext) -> None:
        op = ("backward", context["backward_type"])
        context.insert_before_backward_op(self._count, grad_outputs=[], op=op)

    @amanda.observer
    def _count(self, op: tuple[str, str]) -> None:
        self.executions[op] += 1

    def of(self, phase: str) -> dict[str, int]:
        """Return executions by type."""
        return {kind: count for (its, kind), count in sorted(self.executions.items()) if its == phase}


def check_counts(expected: Mapping[str, int], counts: Mapping[str, int], phase: str, exact: bool) -> None:
    """Raise AssertionError where the count of a type is another; with `exact` also for types not wanted."""
    __tracebackhide__ = True
    lines = []
    for kind in dict.fromkeys([*expected, *(sorted(counts) if exact else ())]):
        if counts.get(kind, 0) == expected.get(kind, 0):
            continue
        near = get_close_matches(
            kind, [counted for counted in counts if counted not in expected], n=1, cutoff=0.5
        )
        hint = f" (did you mean {near[0]!r}?)" if near and kind not in counts else ""
        lines.append(f"{kind}: {counts.get(kind, 0)} executed, {expected.get(kind, 0)} expected{hint}")
    if lines:
        raise AssertionError("\n".join([f"op counts differ ({phase}):", *lines]))
