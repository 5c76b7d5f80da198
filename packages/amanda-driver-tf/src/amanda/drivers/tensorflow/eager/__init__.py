"""Eager mode: every op that Python calls, and the backward ops of the tapes."""

from ._driver import TensorFlowEagerDriver

__all__ = ["TensorFlowEagerDriver"]
