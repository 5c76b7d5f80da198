"""Patterns of ops and their inputs, and rules that replace their matches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union

import amanda
from amanda.errors import ToolError
from amanda.options import Name, NotEmpty, checked
from amanda.tools.select import Patterns

if TYPE_CHECKING:
    from amanda.tools.rewrite._executions import Match

Pattern: TypeAlias = Union["Op", "Maybe", "Capture", None]
"""A pattern of an input; None fits any input, or its absence."""

_COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or"})


class PatternError(ToolError):
    """A pattern or a rule that is not valid."""


class Capture:
    """A pattern that fits any input of an op, and names its value in the match.

    Two captures with one name fit the same value.
    """

    @checked(error=PatternError)
    def __init__(self, name: Name) -> None:
        self.name = name


class Op:
    """A pattern of an op, with patterns for its first inputs.

    type: words of StandardMapping ("conv2d"), or names of the framework; `*` and `?` are wildcards, so "*" is
    any op.  inputs: an Op or a Maybe that makes the input, a Capture, or None for any input; the op may have
    more inputs.  name: of the op in the match.  where: called once with the context, as the op is analysed.
    commutative: True if the inputs may be in any order; by default for add, mul and similar ops.

    An Op that is an input of several patterns fits one op, whose output all of them read.
    """

    @checked(error=PatternError)
    def __init__(
        self,
        type: Name | Annotated[Sequence[Name], NotEmpty],
        *inputs: Pattern,
        name: Name | None = None,
        where: Callable[[amanda.OpContext], bool] | None = None,
        commutative: bool | None = None,
    ) -> None:
        self.types = (type,) if isinstance(type, str) else tuple(type)
        self._types = Patterns("type", self.types)
        self.inputs = inputs
        self.name = name
        self.where = where
        self.commutative = commutative

    def fits(self, context: amanda.OpContext) -> bool:
        """Return True if an op is of the type, and `where` accepts it."""
        if not self._types(context["type"], context.get_op_type()):
            return False
        return self.where is None or bool(self.where(context))

    def orders(self, type: str) -> Iterator[Sequence[Pattern]]:
        """Return the orders that the inputs of an op of this type may have."""
        commutes = type in _COMMUTATIVE if self.commutative is None else self.commutative
        return permutations(self.inputs) if commutes else iter((self.inputs,))

    @property
    def first_input(self) -> Pattern:
        """Return the first pattern among the inputs, which takes the place of an absent op."""
        return next((pattern for pattern in self.inputs if pattern is not None), None)

    def __repr__(self) -> str:
        return f"Op({'|'.join(self.types)}{'' if self.name is None else f', name={self.name}'})"


class Maybe:
    """An op that may be absent; the first pattern among its inputs then takes its place."""

    @checked(error=PatternError)
    def __init__(self, op: Op) -> None:
        if op.first_input is None:
            raise PatternError(f"Maybe wants an op that tells what it is given, not {op!r}")
        self.op = op


@checked(error=PatternError)
@dataclass(frozen=True)
class Rule:
    """A pattern, which is its last op, and a function that computes the output of this op instead.

    replacement: called with the `Match` at every execution; its ops take part in autodiff.
    when: called with the match before each execution; if it returns False, the original computes.  In a
    graph `when` is called once, as the graph is rewritten, with symbols as values.
    name: of the rule in results.
    """

    pattern: Op
    replacement: Callable[[Match], Any]
    when: Callable[[Match], bool] | None = None
    name: str = ""

    def __post_init__(self) -> None:
        names = [op.name for op in self.ops if op.name is not None]
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise PatternError(f"two ops of a pattern have the name {repeated[0]!r}; a match has ops by name")
        if not self.name:
            name = getattr(self.replacement, "__name__", type(self.replacement).__name__)
            object.__setattr__(self, "name", name)

    @property
    def ops(self) -> tuple[Op, ...]:
        """Return each Op of the pattern once, the last one first."""
        ops: dict[Op, None] = {}
        waiting: list[Pattern] = [self.pattern]
        for pattern in waiting:
            op = pattern.op if isinstance(pattern, Maybe) else pattern
            if isinstance(op, Op) and op not in ops:
                ops[op] = None
                waiting += op.inputs
        return tuple(ops)
