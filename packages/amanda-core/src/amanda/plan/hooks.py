"""Calls of plugins' hooks; `amanda.plugins` sets the function, so that no lower room imports `plugins`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _without_plugins(hook: str, **arguments: Any) -> None:
    pass


class HookCaller:
    """Caller of plugins' hooks.

    call: calls all implementations of the hook with this name, with the arguments.
    """

    call: Callable[..., None] = staticmethod(_without_plugins)


hooks = HookCaller()
