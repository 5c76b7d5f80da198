"""A driver: what scopes attach to a framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from amanda.namespace import Namespace
from amanda.scope.report import Report

DRIVER_API = 1
"""Number of this interface; it grows when a driver written for the last one would break."""


class Driver(ABC):
    """One framework, in one or more modes.

    api: the `DRIVER_API` that the driver was written for.
    framework: import name of the framework.
    modes: what the driver serves, e.g. ("eager",).
    """

    api: ClassVar[int]
    framework: ClassVar[str]
    modes: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def namespace(self) -> Namespace:
        """Tags of the ops that this driver brings, e.g. `pytorch/2.13.0/eager`."""

    @abstractmethod
    def attach(self) -> None:
        """Start to intercept; called when the first scope of the process opens."""

    def closing(self, report: Report) -> None:  # noqa: B027 - few drivers have something to finish
        """Finish what tools have begun, as the last scope closes; called before `detach`."""

    @abstractmethod
    def detach(self) -> None:
        """Leave the framework as it was found; called after the last scope has closed."""
