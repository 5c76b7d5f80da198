"""The build hook of amanda-core: with a compiler, without one, and when one is insisted on."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import children
import pytest

CORE = Path(__file__).parents[2] / "packages" / "amanda-core"


def build(place: Path, **env: str) -> subprocess.CompletedProcess[str]:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--verbose",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    return children.run(
        [*pip, "--wheel-dir", str(place), str(CORE)],
        env={**os.environ, "AMANDA_CACHE_DIR": str(place / "cache"), "AMANDA_NATIVE": "1", **env},
    )


@pytest.mark.parametrize("env", [{"AMANDA_NATIVE": "0"}, {"CC": "false"}], ids=["off", "no-compiler"])
def test_without_a_compiler_the_wheel_is_pure_and_the_build_says_so(
    tmp_path: Path, env: dict[str, str]
) -> None:
    done = build(tmp_path, **env, AMANDA_REQUIRE_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.glob("*.whl")] == ["amanda_core-0.2.0-py3-none-any.whl"]
    assert "the pure-Python fallback takes its place" in done.stdout + done.stderr


@pytest.mark.parametrize("env", [{"AMANDA_NATIVE": "0"}, {"CC": "false"}], ids=["off", "no-compiler"])
def test_insisting_on_the_interceptor_makes_its_absence_an_error(tmp_path: Path, env: dict[str, str]) -> None:
    done = build(tmp_path, **env, AMANDA_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert "AMANDA_REQUIRE_NATIVE=1 asks for it" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.long
def test_a_second_build_takes_the_first_ones_interceptor(tmp_path: Path) -> None:
    """The build of the wheel itself is the second one: the metadata came first."""
    done = build(tmp_path, AMANDA_REQUIRE_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("compiling the native interceptor") == 1


def test_the_source_distribution_has_every_native_source(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    children.run(command, cwd=CORE, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    native = CORE / "src" / "amanda" / "interceptor" / "native"
    sources = {path.relative_to(CORE).as_posix() for path in native.rglob("*.[ch]")}
    assert sources
    assert sources <= packed
