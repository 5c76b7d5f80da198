"""Drivers that no distribution registers, for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from amanda.backend import Driver
from amanda.scope.attachment import attachment


@contextmanager
def attached(driver: type[Driver]) -> Iterator[None]:
    """Attach the driver in scopes that open in this context, as if a distribution registered it."""
    if driver in attachment.guests:
        yield
        return
    attachment.guests.append(driver)
    try:
        yield
    finally:
        attachment.guests.remove(driver)
