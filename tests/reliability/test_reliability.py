"""A second of each attack that needs no process of its own; `nox -s reliability` runs all for longer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import children
import pytest

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["PyTorch", "ONNX Runtime"])
def test_frameworks_hold_under_attack(framework: str) -> None:
    attacks = ("threads", "exceptions", "signals")
    command = [sys.executable, str(HERE / "run.py"), *attacks, "--framework", framework, "--seconds", "1"]
    env = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = children.run(command, env=env, check=True)
    assert [line.split(" | ")[:2] for line in done.stdout.splitlines()] == [
        [attack, framework] for attack in attacks
    ]
    assert "AttributeError" not in done.stderr


@pytest.mark.slow
def test_an_attack_that_ends_its_process_has_a_row_and_others_go_on(tmp_path: Path) -> None:
    program = tmp_path / "ends.py"
    program.write_text(
        "import os, sys, soak, run\n"
        "soak.attack = lambda *_: os.abort()\n"
        "run.__file__ = __file__\n"
        "sys.exit(run.main())\n"
    )
    command = [sys.executable, str(program), "soak", "exceptions", "--framework", "ONNX Runtime"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [HERE, SUPPORT]))}
    done = children.run([*command, "--seconds", "0.5"], env=env)
    first, second = done.stdout.splitlines()
    assert first.startswith("soak | ONNX Runtime | 0 attempts | 1 wrong")
    assert first.endswith("the process ended with -6")
    assert " | 0 wrong | nothing left | 4 points" in second
    assert done.returncode == 1
