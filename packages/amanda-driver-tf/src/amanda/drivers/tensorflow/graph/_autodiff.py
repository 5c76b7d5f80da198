"""Tapes of routines that take part in autodiff, and gradients through these routines.

A hot path, which uses TensorFlow's native tapes: `tf.GradientTape` takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import imperative_grad
from tensorflow.python.eager import tape as tapes

TapedValues = tuple[Sequence[Any], list[Any], Any]
"""Inputs and outputs of routines, and the tape that recorded them; None if each output is an input."""


@dataclass
class Readers:
    """The number of nodes that read the saved values of a place.

    read_once: True if each of them runs exactly once in an execution.
    """

    count: int = 0
    read_once: bool = True


class SavedValues:
    """Saved values, which are released when as many readers as expected have read them.

    readers: the expected number; 0 if unknown, then the values live as long as the execution.
    """

    # A variable whose value nothing else holds is updated in place, which saves a copy of its memory.

    def __init__(self, values: TapedValues, readers: int) -> None:
        self._values: TapedValues | None = values
        # `list.pop` is atomic, so that no lock is needed.
        self._pending_reads = [None] * readers

    def take(self) -> TapedValues:
        """Return the values, for one of the readers; the readers may be on several threads."""
        values = self._values
        assert values is not None
        if self._pending_reads:
            self._pending_reads.pop()
            if not self._pending_reads:
                self._values = None
        return values


def call_on_tape(routines: Callable[[], list[Any]], inputs: Sequence[Any]) -> TapedValues:
    """Call routines while a tape records how the outputs depend on the inputs."""
    stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    # Several pullbacks may ask the tape for gradients.
    tape = tapes.push_new_tape(persistent=True)
    try:
        for tensor in inputs:
            tapes.watch(tape, tensor)
        outputs = routines()
    finally:
        tapes.pop_tape(tape)
        if stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()
    returns_inputs = set(map(id, outputs)) <= set(map(id, inputs))
    return inputs, outputs, None if returns_inputs else tape


def pull_back(
    values: TapedValues, outputs: Sequence[int], inputs: Sequence[int], entering: Sequence[Any]
) -> list[Any]:
    """Return the vector-Jacobian products for the inputs and outputs at these positions."""
    place_inputs, place_outputs, tape = values
    if tape is None:
        return [_gradient_of_alias(place_inputs[i], outputs, place_outputs, entering) for i in inputs]
    sources = [place_inputs[i] for i in inputs]
    products = imperative_grad.imperative_grad(
        tape,
        [place_outputs[k] for k in outputs],
        sources,
        list(entering),
        sources,
        tf.UnconnectedGradients.ZERO,
    )
    return [tf.convert_to_tensor(product) for product in products]


def _gradient_of_alias(
    value: Any, outputs: Sequence[int], place_outputs: Sequence[Any], entering: Sequence[Any]
) -> Any:
    """Return the gradient of an input that routines returned: the sum over the outputs that it is."""
    gradients = [gradient for k, gradient in zip(outputs, entering, strict=True) if place_outputs[k] is value]
    if len(gradients) == 1:
        return gradients[0]
    return tf.add_n(gradients) if gradients else tf.zeros_like(value)
