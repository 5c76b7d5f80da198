"""Tests of the user's, run in several processes at once, with tools applied."""

import sys
from pathlib import Path

import children
import pytest

TESTS = """
import amanda, pytest, torch

class Counting(amanda.Tool):
    def __init__(self):
        self.calls = 0
        self.add_inst_for_op(lambda context: context.insert_after_op(self.count, outputs=[]))
    def count(self):
        self.calls += 1

@pytest.fixture
def tool():
    made = Counting()
    with amanda.apply(made):
        yield made

@pytest.mark.parametrize("size", range(8))
def test_a_step(tool, size):
    model = torch.nn.Linear(size + 1, 2)
    before = tool.calls
    model(torch.ones(3, size + 1)).sum().backward()
    assert tool.calls >= before + 3

@pytest.mark.parametrize("size", range(4))
def test_outside(size):
    assert type(torch.nn.Module.__call__).__name__ == "function"
"""


@pytest.mark.long
def test_the_tests_of_a_user_run_in_two_processes(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(TESTS)
    done = children.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses=2", "test_own.py"],
        cwd=tmp_path,
    )
    assert "12 passed" in done.stdout, done.stdout + done.stderr
