"""Files of the repository, which an sdist of one distribution lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def repository_path(path: str) -> Path:
    """Return a path in the repository; skip the test, or the module that asks, in an unpacked sdist."""
    if not (ROOT / "packages").is_dir():
        pytest.skip(f"reads {path} of the repository, which an sdist lacks", allow_module_level=True)
    return ROOT / path
