"""Options of a tool that its analysis routines read: plans hold what these were."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from amanda.plan.lifetime import plan_lifetimes

if TYPE_CHECKING:
    from amanda.plan.tools import AnyTool

_SINGLE = (type(None), bool, int, float, complex, str, bytes)
_SEVERAL = (tuple, list, set, frozenset)


def changed_options(tool: AnyTool) -> Iterator[str]:
    """Say which options have another value than when ops were analysed, each change once."""
    tool_state = tool._amanda
    if tool_state.options_read[0] != tool_state.version:
        tool_state.options_read = (tool_state.version, _options_read(tool))
    names = tool_state.options_read[1]
    if not names:
        return
    now = {name: repr(value) for name in names if _is_plain(value := vars(tool).get(name))}
    before, tool_state.options = tool_state.options, now
    if before is None or not any(
        tool in stack.applied and stack.plans for stack in list(plan_lifetimes.stacks)
    ):
        return
    for name in now:
        if now[name] != before.get(name, now[name]):
            yield (
                f"its analysis reads {name}, which was {before[name]} and is {now[name]} now: ops that were "
                "analysed before keep their plans; analyse_again() has all of them analysed anew"
            )


def _options_read(tool: AnyTool) -> tuple[str, ...]:
    """Return the attributes named after parameters of the tool's class that its analysis routines read."""
    try:
        parameters = list(inspect.signature(type(tool).__init__).parameters)[1:]
    except (TypeError, ValueError):
        return ()
    options = {name for parameter in parameters for name in (parameter, f"_{parameter}")}
    named = (_names(analysis.callback) for analysis in tool._amanda.analyses)
    return tuple(sorted({name for names in named for name in names if name in options}))


def _names(callback: Any) -> tuple[str, ...]:
    """Return the names in a function's own code, not in that of the routines that it defines."""
    code = getattr(inspect.unwrap(callback), "__code__", None)
    names: tuple[str, ...] = () if code is None else code.co_names
    return names


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return all(map(_is_plain, value)) if isinstance(value, _SEVERAL) else isinstance(value, _SINGLE)
