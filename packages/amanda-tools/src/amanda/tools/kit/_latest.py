"""What a tool keeps of one execution of a model until later ops of it run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import amanda


class Latest:
    """Attributes that the last execution of a model has set, in each thread apart; None before.

    Routines of one execution set and read them.  In graphs, whose ops run on threads of the framework's own,
    they are those of the last execution in any thread.  A copy has none.
    """

    def __init__(self, context: amanda.OpContext) -> None:
        self._is_eager = context.is_eager()
        self.clear()

    def clear(self) -> None:
        """Forget what every thread has set."""
        values = threading.local() if self._is_eager else SimpleNamespace()
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._values, name, None)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._values, name, value)

    def __getstate__(self) -> bool:
        return self._is_eager

    def __setstate__(self, is_eager: bool) -> None:
        self._is_eager = is_eager
        self.clear()
