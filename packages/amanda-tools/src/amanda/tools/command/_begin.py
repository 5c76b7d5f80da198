"""Start of a process under `amanda run`: cheap, because most processes never import a framework."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def begin() -> None:
    """Open the scope: at once in the root process, at the first import of a framework in others."""
    handed = json.loads(os.environ["AMANDA_TOOLS"])
    if os.getpid() == handed["root"]:
        _open()
    else:
        sys.meta_path.insert(0, _Beginning(handed["frameworks"]))


def _open() -> None:
    from amanda.tools.command._session import open_session

    open_session()


class _Beginning(MetaPathFinder):
    """Import hook that opens the scope before the first import of a framework."""

    def __init__(self, frameworks: Sequence[str]) -> None:
        self._frameworks = frozenset(frameworks)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._frameworks:
            return None
        sys.meta_path.remove(self)
        _open()
        for finder in list(sys.meta_path):  # opening may have changed the list
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                return spec
        return None
