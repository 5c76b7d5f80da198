"""The tools whose cost is measured: none of them changes a value, unless it says so."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from _measure import Times, Variant, steps_in_turns

import amanda

ON, OFF = "cache on", "cache off"
Make = Callable[[], amanda.Tool]
Predicate = Callable[[amanda.OpContext], bool]
POINTS = {
    "before": (amanda.OpContext.insert_before_op, "inputs"),
    "after": (amanda.OpContext.insert_after_op, "outputs"),
    "before backward": (amanda.OpContext.insert_before_backward_op, "grad_outputs"),
    "after backward": (amanda.OpContext.insert_after_backward_op, "grad_inputs"),
}
FORWARD, BACKWARD = ("before", "after"), ("before backward", "after backward")


class Inserting(amanda.Tool):
    """Inserts a routine at some of the four points of every op; without points it looks and inserts nothing.

    routine: by default one that returns None.  select: positions of the values that it is given.
    where, where_backward: of the ops.  backward: look at backward ops too.
    ops, actions: numbers of ops that were analysed, and of routines that were inserted.
    """

    def __init__(
        self,
        *points: str,
        routine: Callable[..., Any] | None = None,
        select: Sequence[int] | None = None,
        where: Predicate | None = None,
        where_backward: Predicate | None = None,
        backward: bool = False,
    ) -> None:
        self.ops = self.actions = 0
        if routine is not None:
            self.routine = routine  # type: ignore[method-assign]

        def analysis(among: tuple[str, ...], where: Predicate | None) -> Callable[[amanda.OpContext], None]:
            insertions = [POINTS[point] for point in points if point in among]

            def analyse(context: amanda.OpContext) -> None:
                self.ops += 1
                if insertions and (where is None or where(context)):
                    for insert, name in insertions:
                        self.actions += 1
                        insert(context, self.routine, **{name: select})

            return analyse

        self.add_inst_for_op(analysis(FORWARD, where))
        if backward or any(point in BACKWARD for point in points):
            self.add_inst_for_op(analysis(BACKWARD, where_backward), backward=True)

    def routine(self, *values: Any) -> Any:
        """Return None."""


def is_no_leaf(context: amanda.OpContext) -> bool:
    """Return True for a backward op that does not accumulate a gradient.

    Torch copies each gradient that a hook at a leaf may have looked at, instead of keeping it.
    """
    return "Accumulate" not in str(context.get_backward_op())


TOOLS: Mapping[str, Make] = {
    "empty tool": Inserting,
    "empty tool, backward too": lambda: Inserting(backward=True),
    "before": lambda: Inserting("before"),
    "after": lambda: Inserting("after"),
    "before + after": lambda: Inserting(*FORWARD),
    "backward before + after": lambda: Inserting(*BACKWARD),
    "routines at all four points, leaves apart": lambda: Inserting(*POINTS, where_backward=is_no_leaf),
    "routines at all four points": lambda: Inserting(*POINTS),
}


def chosen(*names: str) -> dict[str, Make]:
    """Return some of `TOOLS`."""
    return {name: TOOLS[name] for name in names}


def scopes(tools: Mapping[str, Make], **options: Any) -> dict[str, Variant]:
    """Return a scope for each tool, which is made once."""
    return {name: functools.partial(amanda.apply, make(), **options) for name, make in tools.items()}


def cache_on_and_off(tool: amanda.Tool) -> dict[str, Variant]:
    """Return scopes of a tool with the cache, and without it, where all is analysed at each execution."""

    @contextmanager
    def off() -> Iterator[None]:
        with amanda.apply(tool), amanda.cache_disabled():
            yield

    return {ON: functools.partial(amanda.apply, tool), OFF: off}


def with_and_without_cache(
    step: Callable[[], object], tools: Mapping[str, Make], **options: Any
) -> dict[str, Times]:
    """Return the seconds of steps under each tool with the cache on and off.

    options: of `steps_in_turns`.
    """
    return {name: steps_in_turns(step, cache_on_and_off(make()), **options) for name, make in tools.items()}
