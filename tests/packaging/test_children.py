"""What tests start is limited in time, hears signals, and is gone with the test."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import children
import pytest

ROOT = Path(__file__).parents[2]
# These run outside of pytest, or are run by a program of the tests.
ALONE = {"children.py", "torch_shapes.py"}
STARTS = re.compile(r"^(?!print).*\b(subprocess\.(run|Popen|call|check_\w+)|os\.(system|popen|spawn\w+))\(")
LEAVES = """
import os, sys, time
if os.fork() == 0:
    time.sleep(1000)
print("begun", flush=True)
{then}
"""


def test_every_test_starts_processes_with_a_limit() -> None:
    found = []
    for place in (ROOT / "tests", *ROOT.glob("packages/*/tests")):
        for path in place.rglob("*.py"):
            if path.name in ALONE or "interceptor_fuzz" in path.parts:
                continue
            lines = path.read_text().splitlines()
            found += [f"{path.relative_to(ROOT)}: {line}" for line in lines if STARTS.match(line.strip())]
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("then", ["time.sleep(1000)", "sys.exit()"], ids=["waits", "leaves a process"])
def test_what_outlives_its_limit_is_killed_with_what_it_started(then: str) -> None:
    begun = time.monotonic()
    with pytest.raises(AssertionError, match="ran longer than 3 s\nbegun"):
        children.run([sys.executable, "-c", LEAVES.format(then=then)], limit=3)
    assert time.monotonic() - begun < 60


def test_a_command_that_fails_tells_what_it_printed() -> None:
    with pytest.raises(AssertionError, match="ended with 3\nsaid"):
        children.run([sys.executable, "-c", "import sys; print('said'); sys.exit(3)"], check=True)


def test_a_child_is_interrupted_where_the_tests_are_not() -> None:
    code = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = children.run([sys.executable, "-c", code])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == -signal.SIGINT


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_of_the_tests_ends() -> None:
    child = os.fork()
    if child == 0:
        children.end_after(1)
        time.sleep(60)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGALRM
