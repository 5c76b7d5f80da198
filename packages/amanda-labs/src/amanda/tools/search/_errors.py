"""The error of the tool and the search."""

from __future__ import annotations

from amanda.errors import AmandaError


class SearchError(AmandaError, ValueError):
    """A choice, an architecture, a budget or a model with which nothing can be searched."""
