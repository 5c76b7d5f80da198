"""Calls of plugins' hooks; `amanda.plugins` puts them here, so that no lower room imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _untold(hook: str, **arguments: Any) -> None:
    pass


class Hooks:
    """tell: calls the hook of a name, with its arguments."""

    tell: Callable[..., None] = staticmethod(_untold)


hooks = Hooks()
