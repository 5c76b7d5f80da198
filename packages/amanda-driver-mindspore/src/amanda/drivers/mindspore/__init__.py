"""MindSpore, PyNative mode: every op that Python calls, and its backward ops."""

from ._driver import MindSporeDriver
from ._tensors import register_when_imported

register_when_imported()

__all__ = ["MindSporeDriver"]
