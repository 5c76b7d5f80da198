"""What routines that take part in autodiff record, and gradients through them.

A hot path: `tf.GradientTape` takes ten times as long for what it does besides.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import imperative_grad
from tensorflow.python.eager import tape as tapes

Kept = tuple[Sequence[Any], list[Any], Any]
"""What routines were given and gave, and the tape that leads from one to the other.

None instead of a tape where all that they gave is something that they were given.
"""


def recorded(routines: Callable[[], list[Any]], given: Sequence[Any]) -> Kept:
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
    kept: Kept, outputs: Sequence[int], inputs: Sequence[int], entering: Sequence[Any]
) -> list[Any]:
    """Vector-Jacobian products: for the inputs at these positions, of gradients of these outputs."""
    given, gave, tape = kept
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
