"""Tapes of routines that take part in autodiff, and gradients through them.

A hot path: `tf.GradientTape` takes ten times as long for what it does besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import imperative_grad
from tensorflow.python.eager import tape as tapes

Values = tuple[Sequence[Any], list[Any], Any]
"""Values that routines were given and gave, and the tape that leads from one to the other.

None instead of a tape where all that they gave is something that they were given.
"""


@dataclass
class Readers:
    """The number of nodes that read what a place keeps; told: whether each does so once in an execution."""

    count: int = 0
    told: bool = True


class Kept:
    """Values that are let go as the last of so many readers has them; never where there are none.

    A variable whose value nobody else holds is updated in its own memory.
    """

    def __init__(self, values: Values, readers: int) -> None:
        self._values: Values | None = values
        self._left = [None] * readers

    def taken(self) -> Values:
        """The values, for one of the readers; these may be on several threads."""
        values = self._values
        assert values is not None
        if self._left:
            self._left.pop()
            if not self._left:
                self._values = None
        return values


def recorded(routines: Callable[[], list[Any]], given: Sequence[Any]) -> Values:
    """Call routines while a tape records what becomes of what they are given."""
    stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    tape = tapes.push_new_tape(persistent=True)
    try:
        for tensor in given:
            tapes.watch(tape, tensor)
        gave = routines()
    finally:
        tapes.pop_tape(tape)
        if stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()
    handed_on = {id(one) for one in gave} <= {id(one) for one in given}
    return given, gave, None if handed_on else tape


def gradients(
    values: Values, outputs: Sequence[int], inputs: Sequence[int], entering: Sequence[Any]
) -> list[Any]:
    """Vector-Jacobian products: for the inputs at these positions, of gradients of these outputs."""
    given, gave, tape = values
    if tape is None:
        return [_passed(given[i], outputs, gave, entering) for i in inputs]
    sources = [given[i] for i in inputs]
    found = imperative_grad.imperative_grad(
        tape, [gave[k] for k in outputs], sources, list(entering), sources, tf.UnconnectedGradients.ZERO
    )
    return [tf.convert_to_tensor(one) for one in found]


def _passed(value: Any, outputs: Sequence[int], gave: Sequence[Any], entering: Sequence[Any]) -> Any:
    """The gradient of a value that was handed on."""
    found = [one for k, one in zip(outputs, entering, strict=True) if gave[k] is value]
    if len(found) == 1:
        return found[0]
    return tf.add_n(found) if found else tf.zeros_like(value)
