"""Drivers written for other numbers of the backend interface."""

from amanda.backend import Driver, Namespace


class OldDriver(Driver):
    """Attaches to oldframe, and remembers it."""

    api = 0
    framework = "oldframe"
    modes = ("eager",)
    attached = False

    @property
    def namespace(self) -> Namespace:
        return Namespace("oldframe/1.0/eager")

    def attach(self) -> None:
        type(self).attached = True

    def detach(self) -> None:
        type(self).attached = False


class NewDriver(Driver):
    """Attaches to newframe, and remembers it."""

    api = 99
    framework = "newframe"
    modes = ("eager",)
    attached = False

    @property
    def namespace(self) -> Namespace:
        return Namespace("newframe/1.0/eager")

    def attach(self) -> None:
        type(self).attached = True

    def detach(self) -> None:
        type(self).attached = False
