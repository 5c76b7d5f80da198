"""Projects made of the templates: built, checked, installed into an empty environment, and tested there."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import BIN, ROOT, Empty

pytestmark = pytest.mark.installs
PROGRAMS = Path(sys.executable).parent


def made(template: str, place: Path, **answers: str) -> Path:
    """A project, and its distributions in dist/."""
    given = [argument for name, answer in answers.items() for argument in ("--data", f"{name}={answer}")]
    copier = [str(PROGRAMS / "copier"), "copy", "--quiet", "--defaults", *given]
    subprocess.run([*copier, str(ROOT / "templates" / template), str(place)], check=True)
    assert not [path for path in place.rglob("*") if "{" in path.name or path.suffix == ".jinja"]
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", place], check=True, stdout=subprocess.DEVNULL
    )
    built = sorted((place / "dist").iterdir())
    assert [path.suffix for path in built] == [".whl", ".gz"]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built], check=True)
    return place


def fingerprint(empty: Empty) -> dict[Path, str]:
    """The core's files, as installed."""
    (core,) = empty.home.glob("lib/python*/site-packages/amanda")
    own = [path for path in core.rglob("*.py") if path.parent.name not in ("tools", "drivers")]
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in own
        if not {"tools", "drivers"} & set(path.relative_to(core).parts)
    }


def passes(project: Path, empty: Empty, place: Path) -> str:
    """Run a project's tests on what is installed: its sources are not there."""
    shutil.copytree(project / "tests", place / "tests")
    shutil.copy(project / "pyproject.toml", place)
    done = empty.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=place)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_the_example_of_a_driver_passes_the_conformance_suite(tmp_path: Path, empty: Empty) -> None:
    project = made("driver", tmp_path / "made")
    empty.install("amanda-core")
    before = fingerprint(empty)
    (wheel,) = project.glob("dist/*.whl")
    empty.install(f"amanda-driver-tinyframe[test] @ {wheel.as_uri()}")
    (tmp_path / "run").mkdir()
    assert " passed" in passes(project, empty, tmp_path / "run")
    assert fingerprint(empty) == before
    info = empty.run("amanda", "info", "--load", PYTHONPATH=str(tmp_path / "run" / "tests"))
    (line,) = [line for line in info.stdout.splitlines() if "amanda-driver-tinyframe" in line]
    assert "ready" in line


def test_a_driver_for_another_framework_is_to_be_filled_in(tmp_path: Path, empty: Empty) -> None:
    project = made("driver", tmp_path / "made", framework="otherframe", requirement="")
    (wheel,) = project.glob("dist/*.whl")
    empty.install(f"amanda-driver-otherframe[test] @ {wheel.as_uri()}")
    assert (
        "otherframe is not installed: pip install otherframe" in empty.run("amanda", "info", "--load").stdout
    )
    (project / "tests" / "otherframe").mkdir()
    (project / "tests" / "otherframe" / "__init__.py").write_text('__version__ = "1.0"\n')
    collected = empty.run("python", "-m", "pytest", "-q", "--collect-only", "tests", cwd=project)
    assert collected.returncode == 0, collected.stdout
    assert "TestOtherframeDriver::test_every_op_of_the_model_is_seen_in_order" in collected.stdout


def test_a_tool_counts_on_a_driver_that_nobody_told_it_of(tmp_path: Path, empty: Empty) -> None:
    project = made("tool", tmp_path / "made", tool="calls")
    empty.install("amanda-core[tools]")
    before = fingerprint(empty)
    (wheel,) = project.glob("dist/*.whl")
    empty.install(f"amanda-tool-calls[test] @ {wheel.as_uri()}")
    (tmp_path / "run").mkdir()
    assert " passed" in passes(project, empty, tmp_path / "run")
    assert fingerprint(empty) == before
    assert (empty.home / BIN / "amanda").exists()
    told = empty.run("amanda", "tools").stdout
    assert "calls" in told
