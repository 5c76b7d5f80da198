"""Amanda's driver for autograd."""

from amanda.drivers.autograd._driver import AutogradDriver
from amanda.drivers.autograd._slots import Module, mark_parameters

__all__ = ["AutogradDriver", "Module", "mark_parameters"]
