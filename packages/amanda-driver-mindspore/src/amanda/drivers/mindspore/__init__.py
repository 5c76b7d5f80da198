"""MindSpore, PyNative mode: every op that Python calls, and its backward ops."""

from ._autoray import register_when_imported
from ._driver import MindSporeDriver

register_when_imported()

__all__ = ["MindSporeDriver"]
