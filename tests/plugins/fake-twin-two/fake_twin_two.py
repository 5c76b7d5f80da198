"""A driver that another distribution has too, and one for a mode of its own."""

from amanda.backend import Driver, Namespace


class TwinDriver(Driver):
    """Attaches to twinframe, and remembers it."""

    api = 2
    framework = "twinframe"
    modes = ("eager",)
    attached = False

    @property
    def namespace(self) -> Namespace:
        return Namespace("twinframe/1.0/eager")

    def attach(self) -> None:
        type(self).attached = True

    def detach(self) -> None:
        type(self).attached = False


class ModeDriver(Driver):
    """Attaches to modeframe, and remembers it."""

    api = 2
    framework = "modeframe"
    modes = ("graph",)
    attached = False

    @property
    def namespace(self) -> Namespace:
        return Namespace("modeframe/1.0/graph")

    def attach(self) -> None:
        type(self).attached = True

    def detach(self) -> None:
        type(self).attached = False
