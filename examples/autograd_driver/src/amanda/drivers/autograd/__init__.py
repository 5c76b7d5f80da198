"""Amanda's driver for autograd."""

from amanda.drivers.autograd._driver import AutogradDriver
from amanda.drivers.autograd._slots import Module, Slot, mark_parameters

__all__ = ["AutogradDriver", "Module", "Slot", "mark_parameters"]
