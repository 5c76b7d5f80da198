"""A driver, a tool, a command and hooks as they should be."""

import sys
from collections.abc import Sequence

import amanda
from amanda.backend import Driver, Namespace
from amanda.plugins import hookimpl


class GoodDriver(Driver):
    """Attaches to goodframe, and remembers it."""

    api = 2
    framework = "goodframe"
    modes = ("eager",)
    attached = False

    @property
    def namespace(self) -> Namespace:
        return Namespace("goodframe/1.0/eager")

    def attach(self) -> None:
        type(self).attached = True

    def detach(self) -> None:
        type(self).attached = False


class Counter(amanda.Tool):
    """Has one option that it needs and one with a default."""

    def __init__(self, limit: int, *, label: str = "ops") -> None:
        super().__init__()
        self.limit = limit
        self.label = label


class Pretender:
    """Registered as a tool and none."""


def greet(arguments: Sequence[str]) -> int:
    """Say hello."""
    sys.stdout.write(f"hello {' '.join(arguments)}\n")
    return 3


class Recorder:
    """Notes what the core tells."""

    told: list[str] = []  # noqa: RUF012

    @staticmethod
    @hookimpl
    def amanda_driver_attached(driver: Driver) -> None:
        Recorder.told.append(f"attached {driver.framework}")

    @staticmethod
    @hookimpl
    def amanda_driver_detached(driver: Driver) -> None:
        Recorder.told.append(f"detached {driver.framework}")

    @staticmethod
    @hookimpl
    def amanda_scope_entered() -> None:
        Recorder.told.append("entered")

    @staticmethod
    @hookimpl
    def amanda_scope_left() -> None:
        Recorder.told.append("left")
