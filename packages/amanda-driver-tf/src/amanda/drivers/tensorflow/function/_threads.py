"""The error for a routine that calls a function while TensorFlow has a single thread for ops."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import tensorflow as tf
from amanda.backend import Execution
from amanda.errors import RoutineError

from ..graph import running


class FunctionExecution(Execution):
    """An execution of a function, whose routines run on the threads that all functions share."""


def check_threads(function: Any) -> None:
    """Raise RoutineError if a routine calls a function while there is one thread: it would wait forever."""
    if isinstance(running.execution, FunctionExecution) and _number_of_threads() == 1:
        raise RoutineError(
            f"a routine calls the function {_name(function)}, which would wait forever for the only thread "
            "that TensorFlow has for ops, as the routine runs on it; before any op runs call "
            "tf.config.threading.set_inter_op_parallelism_threads(2), or set TF_NUM_INTEROP_THREADS=2 in the "
            "environment"
        )


@cache
def _number_of_threads() -> int:
    """Return the number of threads for ops: the configured one, or that of available processors."""
    requested = tf.config.threading.get_inter_op_parallelism_threads()
    environment = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    if requested or (environment.isdigit() and int(environment)):
        return int(requested or environment)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _name(function: Any) -> str:
    name = function.decode() if isinstance(function, bytes) else str(function)
    return name.removeprefix("__inference_").removeprefix("__forward_").rpartition("_")[0] or name
