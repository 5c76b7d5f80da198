"""The native interceptor where memory ends: a MemoryError or success, and all is well afterwards."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import children
import pytest

from amanda import interceptor

native = pytest.mark.xfail(
    not interceptor.NATIVE, reason="never: builtins are not placed without native code", run=False
)
SUPPORT = str(Path(__file__).parent / "support")


def run(build: Path, *arguments: str) -> str:
    """Output of a process that runs one of the harnesses to its good end."""
    env = {**os.environ, "AMANDA_FUZZ_BUILD": str(build)}
    env["PYTHONPATH"] = os.pathsep.join([SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", *arguments]
    done = children.run(command, env=env, limit=300)
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-3000:]}"
    return done.stdout


@native
def test_every_allocation_may_fail(tmp_path: Path) -> None:
    scenarios = run(tmp_path, "interceptor_fuzz.allocation").split()
    assert len(scenarios) >= 10
    assert scenarios.pop() == "scopes_open_and_close"
    assert run(tmp_path, "interceptor_fuzz.allocation", *scenarios).endswith("survived\n")


@native
@pytest.mark.xfail(
    (3, 12) <= sys.version_info < (3, 15),
    reason="notyet: CPython crashes where it lacks memory for a function, and scopes are opened by those",
    strict=sys.version_info < (3, 14),  # 3.14 does at some addresses
)
def test_every_allocation_may_fail_while_scopes_open_and_close(tmp_path: Path) -> None:
    """On its own, since code is described by Python again."""
    assert run(tmp_path, "interceptor_fuzz.allocation", "scopes_open_and_close").endswith("survived\n")


@pytest.mark.slow
@native
def test_programs_of_any_bytes_end_as_without_interception(tmp_path: Path) -> None:
    assert run(tmp_path, "interceptor_fuzz.programs", "1000").endswith("1000 programs\n")


@native
def test_programs_leave_nothing_behind(tmp_path: Path) -> None:
    assert run(tmp_path, "interceptor_fuzz.leaks").endswith("blocks a round\n")
