"""Two replicas of a mirrored strategy: in one process, so tools see both, and count both."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import children
import pytest

pytestmark = pytest.mark.long

WORKER = Path(__file__).with_name("worker_tensorflow.py")
MODES = ("fit", "function", "eager")
MACS = 6 * 5 + 5 * 2
ROWS = 16


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("replicas") / "told.json"
    done = children.run(
        [sys.executable, str(WORKER), str(path)], limit=500,
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_weights_are_bit_equal(told: dict[str, Any], mode: str) -> None:
    assert told[mode]["seen"] == told[mode]["bare"]
    assert told["after"] == told["function"]["bare"]


@pytest.mark.parametrize("tool", ["echo", "profile"])
def test_routines_that_are_given_handles_of_both_devices_leave_training_as_it_is(
    told: dict[str, Any], tool: str
) -> None:
    assert told["each"][tool] == told["each"]["bare"]


@pytest.mark.parametrize("mode", MODES)
def test_counts_are_those_of_both_replicas(told: dict[str, Any], mode: str) -> None:
    rows = told[mode]["flops"]["rows"]
    products = {
        phase: sum(row["MACs"] for row in rows if row["type"].startswith("matmul") and row["phase"] == phase)
        for phase in ("forward", "backward")
    }
    assert products["forward"] == ROWS * MACS
    assert products["backward"] == ROWS * (MACS + 5 * 2)  # the first layer's input needs no gradient
    outputs = [row for row in told[mode]["stats"] if (row["type"], row["tensor"]) == ("relu", "output 0")]
    assert sum(row["elements"] for row in outputs) == ROWS * 5


@pytest.mark.parametrize("mode", MODES)
def test_what_a_tool_changes_trains_alike_in_both_replicas(told: dict[str, Any], mode: str) -> None:
    losses, weights = told[mode]["masked"]
    assert losses != told[mode]["bare"][0]
    assert told["function"]["masked"][0] == pytest.approx(told["eager"]["masked"][0], rel=1e-6)
    for first, second in weights:
        assert first == second


def test_lines_are_the_users_or_none(told: dict[str, Any]) -> None:
    for mode in MODES:
        assert not any("threading.py" in row["source"] for row in told[mode]["flops"]["rows"])
