"""Graphs that sessions run (tf.compat.v1)."""

from ._driver import GraphDriver

__all__ = ["GraphDriver"]
