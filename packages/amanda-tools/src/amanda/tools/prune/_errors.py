"""What the tool says when it cannot do what it is asked for."""

from __future__ import annotations

from amanda.errors import AmandaError


class PruneError(AmandaError, ValueError):
    """An option, a weight or a model with which pruning makes no sense."""


class ShapeError(PruneError):
    """A weight whose shape a pattern does not fit."""
