"""The example of one pass, as the command runs it."""

import sys
from pathlib import Path

import children
import pytest

SCRIPT = Path(__file__).parents[2] / "examples/step.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "macs"),
    [
        pytest.param(["mobilenet_v2"], "300.8 M", marks=pytest.mark.long),
        (["mobilenet_v2", "--train"], "891.5 M"),
    ],
)
def test_flops_of_an_unmodified_model_are_told(arguments: list[str], macs: str) -> None:
    command = [sys.executable, "-m", "amanda", "run", "-t", "flops", "--", str(SCRIPT), *arguments]
    done = children.run(command, check=True)
    assert done.stdout == "(1, 1000)\n"
    (total,) = [line for line in done.stderr.splitlines() if line.strip().startswith("total")]
    assert macs in total
