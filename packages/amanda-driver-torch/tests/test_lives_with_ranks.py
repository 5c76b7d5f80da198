"""Training over ranks: DDP, FSDP2, tensor parallelism, pipelines, and collectives themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
from ranks import TRAININGS, RankResults

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[RankResults]:
    """Return the results of two ranks, of one launch."""
    return ranks.results_of_ranks(Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_gradients_and_parameters_are_bit_equal(results: list[RankResults], name: str) -> None:
    for result in results:
        assert result[name]["bare again"]
        assert result[name]["same"]


@pytest.mark.parametrize("name", TRAININGS)
def test_forward_and_backward_ops_are_seen(results: list[RankResults], name: str) -> None:
    for result in results:
        forward, backward = ([*result[name][phase].values()] for phase in ("forward", "backward"))
        for layer in ("blocks.0.first", "blocks.1.last", "head"):
            assert sum(kind.endswith(f"{layer}:linear") for kind in forward) == 1
            assert sum(kind.endswith(f"{layer}:AddmmBackward0") for kind in backward) == 1
        # A parameter's gradient is added up once for each: where it is a shard, by the sharded one.
        assert sum(kind.endswith("AccumulateGrad") for kind in backward) >= 10
        assert result[name]["calls"] > 500


@pytest.mark.parametrize("name", TRAININGS)
def test_ops_have_equal_ids_in_all_ranks(results: list[RankResults], name: str) -> None:
    """But for what one of them does alone: fill up a shard that is smaller, be the root."""
    first, second = (result[name]["forward"] | result[name]["backward"] for result in results)
    alone = {
        kind.rpartition(":")[2]
        for ids in (first, second)
        for key, kind in ids.items()
        if key not in first.keys() & second.keys()
    }
    assert alone <= {"pad", "scatter"}
    assert all(first[key] == second[key] for key in first.keys() & second.keys())


def test_what_is_not_seen_is_reported(results: list[RankResults]) -> None:
    for result in results:
        assert result["DDP"]["report"] == ["collectives of DistributedDataParallel"]
        assert result["DDP, communication hook"]["report"] == []  # calls them in Python
        hook = " ".join(result["DDP, communication hook"]["forward"].values())
        assert "c10d::all_reduce" in hook
        assert ":copy_" in hook  # on a thread of the process group, or on this one
        assert result["FSDP2"]["report"] == result["tensor parallel"]["report"] == []


def test_fake_tensors_of_distributed_ones_are_no_ops(results: list[RankResults]) -> None:
    for result in results:
        inside = [
            kind
            for kind in result["tensor parallel"]["forward"].values()
            if kind.startswith("blocks.0.first")
        ]
        assert not any(kind.endswith((":mm", ":addmm", ":empty_strided")) for kind in inside)


@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
def test_weights_that_a_tool_masks_train_as_by_hand_and_alike_in_all_ranks(
    results: list[RankResults], name: str
) -> None:
    first, second = (result["masked"][name] for result in results)
    assert first["same"]
    assert second["same"]
    assert first["parameters"] == second["parameters"]


def test_collectives_are_ops_whose_inputs_can_be_changed(results: list[RankResults]) -> None:
    for result in results:
        collectives = result["collectives"]
        assert set(collectives["ops"]) >= {
            "c10d::all_reduce", "c10d::all_gather", "c10d::all_gather_into_tensor", "c10d::broadcast",
            "_c10d_functional::all_reduce",
        }  # fmt: skip
        assert {"c10d::send", "c10d::recv"} & set(collectives["ops"])
        assert collectives["reduced"] == [6.0] * 3  # 2 * 1 + 2 * 2
        assert collectives["waited"] == [24.0] * 3  # each gives 2 * 6
        assert collectives["gathered"] == [[3.0] * 3, [6.0] * 3]
        assert collectives["rows"] == [1.0] * 3 + [2.0] * 3
        assert collectives["report"] == []


def test_a_routine_after_a_functional_collective_is_given_its_result(results: list[RankResults]) -> None:
    for result in results:
        assert result["collectives"]["given"] == [9.0, 9.0]
        assert result["collectives"]["total"] == [3.0] * 3


def test_stages_of_a_pipeline_are_seen(results: list[RankResults]) -> None:
    sent, received = (result["pipeline"] for result in results)
    assert sent["same"]
    assert received["same"]
    for result in (sent, received):
        assert sum(kind == "first:linear" for kind in result["forward"]) == 1
        assert sum(kind == "first:AddmmBackward0" for kind in result["backward"]) == 1
    assert any(kind.endswith("c10d::send") for kind in sent["forward"])
    assert any(kind.endswith("c10d::recv") for kind in received["forward"])
