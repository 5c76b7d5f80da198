"""The example of a model in stages trains to the bits of one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from children import run

SCRIPT = Path(__file__).parents[2] / "examples/pipeline.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "schedule"), [(2, "1f1b"), pytest.param(4, "gpipe", marks=pytest.mark.long)]
)
def test_stages_train_as_one_process(ranks: int, schedule: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = run(
        [*command, SCRIPT, "--schedule", schedule], limit=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert f"rank {ranks - 1}: losses" in done.stdout
    assert done.stdout.strip().endswith("as in one process: True")
