"""MindSpore, PyNative mode: every op that Python calls, and its backward ops."""

from ._driver import MindSporeDriver

__all__ = ["MindSporeDriver"]
