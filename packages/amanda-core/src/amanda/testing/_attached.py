"""Drivers that no distribution registers, for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from amanda._attachment import attachment
from amanda.backend import Driver


@contextmanager
def attached(driver: type[Driver]) -> Iterator[None]:
    """Let scopes that open in this context attach the driver, as if a distribution registered it."""
    if driver in attachment.guests:
        yield
        return
    attachment.guests.append(driver)
    try:
        yield
    finally:
        attachment.guests.remove(driver)
