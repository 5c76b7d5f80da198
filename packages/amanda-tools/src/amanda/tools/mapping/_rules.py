"""MappingTool: functions that rewrite contexts before and after the tools that depend on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

from amanda import Namespace, OpContext, Tool
from amanda.errors import ToolError
from amanda.options import Where, checked

Rewrite = Callable[[OpContext], None]


class RuleError(ToolError):
    """A mapping rule is not `[namespace, before]` or `[namespace, before, after]`."""


class Rule(NamedTuple):
    """Rules for the contexts of a namespace, before and after the tools that depend on it."""

    namespace: Namespace
    before: Rewrite | None
    after: Rewrite | None = None


Rules: TypeAlias = Annotated[Sequence[Sequence[Any]], Where("a list of rules: [[namespace, before], ...]")]


class MappingTool(Tool):
    """Rewrites the contexts that the tools which depend on it read.

    rules: `[namespace, before]` or `[namespace, before, after]`.  A rule applies to an op whose
    namespace it matches: "pytorch" and "tensorflow/2.21.0" by their leading tags, "*/*/graph" by place.
    At each point where a dependent tool has an analysis routine, `before(context)` runs ahead of
    all of them and `after(context)` once behind the last; `before`s in the order of the rules,
    `after`s in reverse.  One of the two may be None.

    Raises RuleError, which says what is wrong with which rule.

    >>> def name(context):
    ...     context["op_name"] = context.get_op().__name__
    >>> mapping = MappingTool(rules=[["pytorch", name]])
    """

    follows_dependents = True

    @checked(error=RuleError)
    def __init__(self, rules: Rules) -> None:
        self.rules = [_read(rule, f"rules[{position}]") for position, rule in enumerate(rules)]
        for backward in (False, True):
            for require_outputs in (False, True):
                self.add_inst_for_op(self._map, backward, require_outputs)
                if any(rule.after for rule in self.rules):
                    self.add_closing_inst_for_op(self._map_back, backward, require_outputs)

    def _map(self, context: OpContext) -> None:
        for rule in self.rules:
            if rule.before is not None and context.namespace.matches(rule.namespace):
                rule.before(context)

    def _map_back(self, context: OpContext) -> None:
        for rule in reversed(self.rules):
            if rule.after is not None and context.namespace.matches(rule.namespace):
                rule.after(context)


def _read(rule: Sequence[Any], which: str) -> Rule:
    wanted = "a rule is [namespace, before] or [namespace, before, after]"
    if isinstance(rule, (str, bytes)) or not isinstance(rule, Sequence):
        raise RuleError(f"{which} is {rule!r}; {wanted}")
    if len(rule) not in (2, 3):
        raise RuleError(f"{which} has {len(rule)} elements; {wanted}")
    namespace, *functions = rule
    if not isinstance(namespace, (str, Namespace)):
        raise RuleError(
            f'the namespace of {which} is {namespace!r}; give tags such as "pytorch" or "*/*/graph"'
        )
    tags = Namespace(str(namespace))
    if not all(tags):
        raise RuleError(
            f'the namespace of {which} is "{namespace}", which has an empty tag; "*" stands for any'
        )
    for name, function in zip(("before", "after"), functions, strict=False):
        if function is not None and not callable(function):
            raise RuleError(f"`{name}` of {which} is {function!r}; give a function of one context, or None")
    if not any(functions):
        raise RuleError(f"{which} has no function; {wanted}")
    return Rule(tags, *functions)
