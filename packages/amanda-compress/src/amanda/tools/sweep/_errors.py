"""Error of sweeps."""

from amanda.errors import AmandaError


class SweepError(AmandaError, ValueError):
    """A sweep that cannot be made."""
