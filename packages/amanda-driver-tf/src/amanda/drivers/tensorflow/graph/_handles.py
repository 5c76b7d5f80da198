"""Handles of resources for routines, where resources are on several devices.

TensorFlow places a node on the device of the resource that it reads, so no node can read resources of two
devices. A node beside each resource stores its handle, and passes on a number for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import tensorflow as tf
from amanda.backend import Execution
from tensorflow.python.eager import context

RESOURCE = tf.resource.as_datatype_enum
_numbers = count(1)


class LentHandle:
    """Stores a handle until another node takes it, and returns a number for the handle."""

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """Return the number."""
        number = next(_numbers)
        execution.store(_loan_key(number), flat[0])
        return [tf.constant(number, tf.int64)]


def resolve_handles(execution: Execution, flat: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
    """Return a node's inputs with stored handles instead of the numbers at these positions."""
    if not positions:
        return flat
    tensors = list(flat)
    for i in positions:
        (tensors[i],) = execution.stores.pop(_loan_key(int(flat[i])))
    return tensors


def on_several_devices(ops: Iterable[tf.Operation]) -> bool:
    """Return True if the process or the operations have several devices."""
    if len(context.context().list_logical_devices()) > 1:
        return True
    return len({op.device for op in ops if op.device}) > 1


def _loan_key(number: int) -> tuple[str, int]:
    return "lent", number
