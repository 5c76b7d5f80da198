"""A routine that calls a function needs a thread of TensorFlow's besides the one that it runs on."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import tensorflow as tf
from amanda.backend import Execution
from amanda.errors import RoutineError

from ..graph import calling


class Call(Execution):
    """One of a function that is called: its routines run on the threads that all functions share."""


def check_threads(function: Any) -> None:
    """Raise a RoutineError where a routine, on the only thread, calls a function: it would wait forever."""
    if isinstance(calling.execution, Call) and _number_of_threads() == 1:
        raise RoutineError(
            f"a routine calls the function {_name(function)}, which would wait forever for the only thread "
            "that TensorFlow has for ops, as the routine runs on it; before any op runs call "
            "tf.config.threading.set_inter_op_parallelism_threads(2), or set TF_NUM_INTEROP_THREADS=2 in the "
            "environment"
        )


@cache
def _number_of_threads() -> int:
    """As TensorFlow has started: what was asked for, or one for each processor that it may run on."""
    asked = tf.config.threading.get_inter_op_parallelism_threads()
    environment = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    if asked or (environment.isdigit() and int(environment)):
        return int(asked or environment)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _name(function: Any) -> str:
    name = function.decode() if isinstance(function, bytes) else str(function)
    return name.removeprefix("__inference_").removeprefix("__forward_").rpartition("_")[0] or name
