"""Marks of gaps: each a strict xfail with a reason, so that a gap that closes is noticed."""

from __future__ import annotations

import pytest


def notimpl(reason: str) -> pytest.MarkDecorator:
    """A gap that this driver could close."""
    return pytest.mark.xfail(strict=True, reason=f"not implemented: {reason}")


def notyet(reason: str) -> pytest.MarkDecorator:
    """A gap that waits for the framework, or for the core."""
    return pytest.mark.xfail(strict=True, reason=f"not yet: {reason}")


def never(reason: str) -> pytest.MarkDecorator:
    """A gap that the framework's nature leaves open."""
    return pytest.mark.xfail(strict=True, reason=f"never: {reason}")
