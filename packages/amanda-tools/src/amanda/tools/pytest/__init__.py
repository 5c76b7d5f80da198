"""Tests of what a model executes: op counts, FLOPs, finite values, and graphs that stay as they are.

def test_the_model_is_what_it_was(amanda_trace):
    amanda_trace(model, x)
    amanda_trace.assert_op_counts({"conv2d": 53, "linear": 1})
    amanda_trace.assert_snapshot()
"""

from amanda.tools.pytest._asserts import Traced, assert_finite, assert_flops, assert_op_counts

__all__ = ["Traced", "assert_finite", "assert_flops", "assert_op_counts"]
