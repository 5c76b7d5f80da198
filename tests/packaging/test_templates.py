"""Projects made of the templates: built, checked, installed into an empty environment, and tested there."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import children
import pytest
import yaml

from .conftest import BIN, ROOT, Empty

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.installs
PROGRAMS = Path(sys.executable).parent


def copied(template: str, place: Path, **answers: str) -> subprocess.CompletedProcess[str]:
    """What copier makes of a template and answers."""
    given = [argument for name, answer in answers.items() for argument in ("--data", f"{name}={answer}")]
    command = [str(PROGRAMS / "copier"), "copy", "--quiet", "--defaults", *given]
    command += [str(ROOT / "templates" / template), str(place)]
    return children.run(command)


def made(template: str, place: Path, **answers: str) -> Path:
    """A project, and its distributions in dist/."""
    done = copied(template, place, **answers)
    assert not done.returncode, done.stderr
    assert not [path for path in place.rglob("*") if "{" in path.name or path.suffix == ".jinja"]
    children.run(
        [sys.executable, "-m", "build", "--no-isolation", place], check=True, stdout=subprocess.DEVNULL
    )
    built = sorted((place / "dist").iterdir())
    assert [path.suffix for path in built] == [".whl", ".gz"]
    children.run([sys.executable, "-m", "twine", "check", "--strict", *built], check=True)
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


@pytest.mark.parametrize(
    ("template", "name", "packages"), [("tool", "tool", "tools"), ("driver", "framework", "drivers")]
)
def test_names_that_amanda_has_or_python_keeps_are_refused(
    template: str, name: str, packages: str, tmp_path: Path
) -> None:
    questions = yaml.safe_load((ROOT / "templates" / template / "copier.yml").read_text(encoding="utf-8"))
    taken = {path.parent.name for path in ROOT.glob(f"packages/*/src/amanda/{packages}/[!_]*/__init__.py")}
    assert set(questions["taken"]["default"].split()) == taken
    one = min(taken)
    for answer, said in ((one, f"amanda.{packages}.{one}"), ("class", "Python"), ("two words", "Python")):
        done = copied(template, tmp_path / "made", **{name: answer})
        assert done.returncode
        assert said in done.stderr
        assert not (tmp_path / "made").exists()


def test_quotes_in_answers_are_kept(tmp_path: Path) -> None:
    author, requirement = 'Ann "A" B\\C', 'otherframe>=1; python_version>"3.9"'
    done = copied("driver", tmp_path, framework="otherframe", author=author, requirement=requirement)
    assert not done.returncode, done.stderr
    told = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert told["authors"] == [{"name": author}]
    assert told["dependencies"][-1] == requirement
