"""Tests of what a model executes: op counts, FLOPs, finite values, and graphs that stay as they are.

def test_the_model_is_what_it_was(amanda_trace):
    amanda_trace(model, x)
    amanda_trace.assert_op_counts({"conv2d": 53, "linear": 1})
    amanda_trace.assert_snapshot()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda.tools.pytest._asserts import assert_finite, assert_flops, assert_op_counts
    from amanda.tools.pytest._traced import Traced

__all__ = ["Traced", "assert_finite", "assert_flops", "assert_op_counts"]


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: pytest imports this package wherever it is installed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}._{'traced' if name == 'Traced' else 'asserts'}"), name)
