"""Assertions that run a function under a tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import amanda
from amanda.tools.pytest._counts import Counts, difference

T = TypeVar("T")
Compiled = Literal["eager", "instrument"]
"""As of `amanda.apply`: what becomes of callables that torch.compile made."""


def assert_flops(
    function: Callable[..., T],
    *inputs: Any,
    macs: int | None = None,
    flops: int | None = None,
    rel: float = 0.0,
    phase: str | None = None,
    compiled: Compiled = "eager",
) -> T:
    """Run `function(*inputs)`: it costs so many multiply-accumulates or FLOPs, within `rel` of them.

    phase: one of the words of StandardMapping, "forward" for one; all of them if None.  Gives what the
    function returns.
    Raises AssertionError, with the costliest types of ops, and TypeError where nothing is expected.
    """
    __tracebackhide__ = True
    from amanda.tools.flops import FlopsTool

    wanted = {"macs": macs, "flops": flops}
    if macs is None and flops is None:
        raise TypeError("assert_flops was given nothing to compare with; give macs=... or flops=...")
    tool = FlopsTool()
    with amanda.apply(tool, compiled=compiled):
        output = function(*inputs)
    result = tool.result
    wrong = [
        f"{what}: {result.total(what, phase):,} counted, {expected:,} expected"
        + (f" within {rel:.2%}" if rel else "")
        for what, expected in wanted.items()
        if expected is not None and abs(result.total(what, phase) - expected) > rel * expected
    ]
    if wrong:
        raise AssertionError("\n".join([*wrong, str(result.by("phase", "type"))]))
    return output


def assert_op_counts(
    wanted: Mapping[str, int],
    function: Callable[..., T],
    *inputs: Any,
    phase: Literal["forward", "backward"] = "forward",
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
    if lines := difference(wanted, tool.of(phase), exact):
        raise AssertionError("\n".join([f"op counts differ ({phase}):", *lines]))
    return output


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
