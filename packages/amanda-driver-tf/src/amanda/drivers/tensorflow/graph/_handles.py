"""Handles of resources for routines, where these are on several devices.

TensorFlow places a node beside the resource that it reads, so that no node can read those of two devices.
Each handle is lent by a node of its own, and a number stands for it.
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


class Lent:
    """Keeps a handle until the node that borrows it runs, and gives the number of the loan."""

    def run(self, execution: Execution, flat: Sequence[Any], rounds: Sequence[int] = ()) -> list[Any]:
        """The number."""
        number = next(_numbers)
        execution.store(_place(number), flat[0])
        return [tf.constant(number, tf.int64)]


def borrowed(execution: Execution, flat: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
    """Return what a node was given, with the handles that numbers at these positions stand for."""
    if not positions:
        return flat
    found = list(flat)
    for i in positions:
        (found[i],) = execution.stores.pop(_place(int(flat[i])))
    return found


def on_several_devices(ops: Iterable[tf.Operation]) -> bool:
    """Return whether resources may be on several devices, of the process or those that operations ask for."""
    if len(context.context().list_logical_devices()) > 1:
        return True
    return len({op.device for op in ops if op.device}) > 1


def _place(number: int) -> tuple[str, int]:
    return "lent", number
