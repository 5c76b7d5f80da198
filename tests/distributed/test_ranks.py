"""Two ranks of PyTorch train as without tools, and what tools find becomes one result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import children
import pytest

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.results import Result, load, merge
from amanda.tools.stats import StatsTool

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("worker_torch.py")
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
    "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost",
]  # fmt: skip
KINDS = ("ddp", "fsdp2")
LAYERS = ("linear", "linear_backward")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which both ranks have told, and what they printed."""
    folder = tmp_path_factory.mktemp("ranks")
    done = children.run(
        [*TORCHRUN, str(WORKER), str(folder)], limit=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def told(run: tuple[Path, str]) -> list[dict[str, Any]]:
    return [json.loads((run[0] / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone(example: Callable[[str], ModuleType]) -> dict[str, Result]:
    """What one process finds that trains on the halves, one after the other, for a step."""
    ddp = example("ddp")
    found: dict[str, list[Result]] = {"flops": [], "stats": []}
    for rank in (0, 1):
        tools = FlopsTool(), StatsTool()
        model, share = ddp.network(), ddp.batches(rank, 2, 1)
        with amanda.apply(*tools):
            ddp.train(model, share)
        for tool in tools:
            found[tool.result.name].append(tool.result)
    return {name: merge({"rank0": first, "rank1": second}) for name, (first, second) in found.items()}


def of_layers(result: Result) -> list[tuple[Any, ...]]:
    """Rows of the layers without their modules and lines."""
    names = [column.name for column in result.columns]
    rows = [dict(zip(names, row, strict=True)) for row in result.rows()]
    return sorted(
        tuple(value for name, value in row.items() if name not in ("module", "source"))
        for row in rows
        if row["type"] in LAYERS
    )


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_parameters_are_bit_equal(told: list[dict[str, Any]], kind: str) -> None:
    assert [one[kind]["same"] for one in told] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", ["flops", "stats"])
def test_what_is_gathered_is_the_sum_of_the_halves(
    run: tuple[Path, str], alone: dict[str, Result], kind: str, tool: str
) -> None:
    gathered = load(run[0] / f"{kind}.{tool}.json")
    assert gathered.remarks == ["Of rank0 and rank1 together."]
    found, expected = of_layers(gathered), of_layers(alone[tool])
    assert len(found) == len(expected) >= 4
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_the_same_or_one_alone_does(told: list[dict[str, Any]], kind: str) -> None:
    first, second = (one[kind] for one in told)
    assert first["flops"] == second["flops"]
    assert first["stats"] == second["stats"]
    assert [first["to the second"], second["to the second"]] == [False, True]
    assert set(first["by rank"]) == {0, 1}  # what cannot be merged is told of each


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool", ["prune", "quantize", "qat"])
def test_a_tool_that_changes_values_leaves_all_ranks_alike(
    told: list[dict[str, Any]], kind: str, tool: str
) -> None:
    first, second = (one[kind][tool] for one in told)
    assert first == second


def test_weights_train_alike_sharded_and_replicated(told: list[dict[str, Any]]) -> None:
    for tool in ("prune", "quantize"):
        for one, other in zip(told[0]["ddp"][tool], told[0]["fsdp2"][tool], strict=True):
            assert one == pytest.approx(other, abs=1e-6) if not isinstance(one[0], list) else True


def test_the_example_tells_once_of_both(run: tuple[Path, str]) -> None:
    printed = run[1]
    assert printed.count("FLOPs by phase by rank") == 1
    assert printed.count("Of rank0 and rank1 together.") == 2
    assert "Statistics of tensors" in printed


def test_flops_of_distributed_tensors_are_shared_out(told: list[dict[str, Any]]) -> None:
    first, second = 16 * 16 * 64, 16 * 64 * 4
    for one in told:
        assert one["tensor parallel"]["macs"] == {"forward": first + second, "backward": first + 2 * second}
        assert "output 0 (partial)" in one["tensor parallel"]["tensors"]


def test_tools_look_at_collectives(told: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(told):
        gathered, scattered, unsupported = one["collectives"]
        assert gathered == [2.0] * 3
        assert scattered == [1.0 + rank] * 3
        assert unsupported == {}
