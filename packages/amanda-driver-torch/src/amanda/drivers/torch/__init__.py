"""The driver of PyTorch's eager mode."""

from ._driver import TorchDriver

__all__ = ["TorchDriver"]
