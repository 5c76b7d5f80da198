"""Wheels of the distributions, and empty environments to install them into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import children
import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
BIN = "Scripts" if os.name == "nt" else "bin"


class Empty:
    """An environment with pip alone, which installs from folders of wheels and from no index."""

    def __init__(self, home: Path, folders: list[Path]) -> None:
        venv.create(home, with_pip=True)
        self.home = home
        self._links = [argument for folder in folders for argument in ("--find-links", str(folder))]

    def run(
        self, program: str, *arguments: str, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, outside of the repository."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        return children.run(
            [self.home / BIN / program, *arguments],
            env={**plain, **env},
            cwd=cwd or self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def install(self, *requirements: str) -> None:
        """Install them with what they need."""
        pip = ("-m", "pip", "--isolated", "install", "--quiet", "--no-index", *self._links)
        done = self.run("python", *pip, *requirements, PIP_CONFIG_FILE=os.devnull)
        assert done.returncode == 0, done.stdout

    def installed(self) -> set[str]:
        """Names of the distributions that are there, besides pip and setuptools."""
        done = self.run(
            "python", "-m", "pip", "--isolated", "--disable-pip-version-check", "list", "--format=json"
        )
        return {one["name"] for one in json.loads(done.stdout)} - {"pip", "setuptools"}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one wheel of each distribution: that of AMANDA_WHEELS, else they are built."""
    if given := os.environ.get("AMANDA_WHEELS"):
        return Path(given)
    place = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    children.run([*pip, "--wheel-dir", place, *DISTRIBUTIONS], check=True)
    return place


@pytest.fixture
def empty(wheels: Path, tmp_path: Path) -> Empty:
    """An empty environment; what others make is in the folder that AMANDA_WHEELHOUSE names."""
    return Empty(tmp_path / "empty", [wheels, Path(os.environ["AMANDA_WHEELHOUSE"])])
