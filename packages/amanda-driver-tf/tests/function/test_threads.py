"""Where a routine needs a thread of TensorFlow's that is not there, it is told instead of waiting forever."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import children
import pytest

PROGRAM = """
import amanda, tensorflow as tf
halved = tf.function(lambda x: x / 2, autograph=False)
squared = tf.function(lambda x: tf.square(x), autograph=False)
tool = amanda.Tool()
tool.add_inst_for_op(
    lambda context: context.get_op_type() == "Square" and context.insert_before_op(lambda x: halved(x))
)
tf.config.threading.set_inter_op_parallelism_threads({threads})
with amanda.apply(tool):
    print(squared(tf.constant(6.0)).numpy())
"""


def run(threads: int, **environment: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(threads=threads)
    return children.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        limit=300,
    )


@pytest.mark.slow
def test_a_routine_that_calls_a_function_on_the_only_thread_for_ops_is_told() -> None:
    done = run(0, TF_NUM_INTEROP_THREADS="1")
    assert done.returncode == 1
    assert re.search(r"RoutineError: insert_before_op\(lambda at .*\) calls the function", done.stderr)
    assert "TF_NUM_INTEROP_THREADS=2" in done.stderr


@pytest.mark.long
def test_with_two_threads_a_routine_may_call_a_function() -> None:
    done = run(2, TF_NUM_INTEROP_THREADS="1")
    assert done.stdout == "9.0\n", done.stderr[-2000:]
