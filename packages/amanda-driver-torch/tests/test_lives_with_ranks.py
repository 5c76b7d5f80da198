"""Training over ranks: DDP, FSDP2, tensor parallelism, pipelines, and collectives themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
from ranks import TRAININGS, Told

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """What each of two ranks tells, of one launch."""
    return ranks.told_by_ranks(Path(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_gradients_and_parameters_are_bit_equal(told: list[Told], name: str) -> None:
    for one in told:
        assert one[name]["bare again"]
        assert one[name]["same"]


@pytest.mark.parametrize("name", TRAININGS)
def test_forward_and_backward_ops_are_seen(told: list[Told], name: str) -> None:
    for one in told:
        forward, backward = ([*one[name][phase].values()] for phase in ("forward", "backward"))
        for layer in ("blocks.0.first", "blocks.1.last", "head"):
            assert sum(kind.endswith(f"{layer}:linear") for kind in forward) == 1
            assert sum(kind.endswith(f"{layer}:AddmmBackward0") for kind in backward) == 1
        # A parameter's gradient is added up once for each: where it is a shard, by the sharded one.
        assert sum(kind.endswith("AccumulateGrad") for kind in backward) >= 10
        assert one[name]["calls"] > 500


@pytest.mark.parametrize("name", TRAININGS)
def test_ops_have_equal_ids_in_all_ranks(told: list[Told], name: str) -> None:
    """But for what one of them does alone: fill up a shard that is smaller, be the root."""
    first, second = (one[name]["forward"] | one[name]["backward"] for one in told)
    alone = {
        kind.rpartition(":")[2]
        for ids in (first, second)
        for key, kind in ids.items()
        if key not in first.keys() & second.keys()
    }
    assert alone <= {"pad", "scatter"}
    assert all(first[key] == second[key] for key in first.keys() & second.keys())


def test_what_is_not_seen_is_reported(told: list[Told]) -> None:
    for one in told:
        assert one["DDP"]["report"] == ["collectives of DistributedDataParallel"]
        assert one["DDP, communication hook"]["report"] == []  # calls them in Python
        hook = " ".join(one["DDP, communication hook"]["forward"].values())
        assert "c10d::all_reduce" in hook
        assert ":copy_" in hook  # on a thread of the process group, or on this one
        assert one["FSDP2"]["report"] == one["tensor parallel"]["report"] == []


def test_fake_tensors_of_distributed_ones_are_no_ops(told: list[Told]) -> None:
    for one in told:
        inside = [
            kind for kind in one["tensor parallel"]["forward"].values() if kind.startswith("blocks.0.first")
        ]
        assert not any(kind.endswith((":mm", ":addmm", ":empty_strided")) for kind in inside)


@pytest.mark.parametrize("name", ["DDP", "FSDP2"])
def test_weights_that_a_tool_masks_train_as_by_hand_and_alike_in_all_ranks(
    told: list[Told], name: str
) -> None:
    first, second = (one["masked"][name] for one in told)
    assert first["same"]
    assert second["same"]
    assert first["parameters"] == second["parameters"]


def test_collectives_are_ops_whose_inputs_can_be_changed(told: list[Told]) -> None:
    for one in told:
        found = one["collectives"]
        assert set(found["ops"]) >= {
            "c10d::all_reduce", "c10d::all_gather", "c10d::all_gather_into_tensor", "c10d::broadcast",
            "_c10d_functional::all_reduce",
        }  # fmt: skip
        assert {"c10d::send", "c10d::recv"} & set(found["ops"])
        assert found["reduced"] == [6.0] * 3  # 2 * 1 + 2 * 2
        assert found["waited"] == [24.0] * 3  # each gives 2 * 6
        assert found["gathered"] == [[3.0] * 3, [6.0] * 3]
        assert found["rows"] == [1.0] * 3 + [2.0] * 3
        assert found["report"] == []


def test_a_routine_after_a_functional_collective_is_given_its_result(told: list[Told]) -> None:
    for one in told:
        assert one["collectives"]["given"] == [9.0, 9.0]
        assert one["collectives"]["total"] == [3.0] * 3


def test_stages_of_a_pipeline_are_seen(told: list[Told]) -> None:
    sent, received = (one["pipeline"] for one in told)
    assert sent["same"]
    assert received["same"]
    for one in (sent, received):
        assert sum(kind == "first:linear" for kind in one["forward"]) == 1
        assert sum(kind == "first:AddmmBackward0" for kind in one["backward"]) == 1
    assert any(kind.endswith("c10d::send") for kind in sent["forward"])
    assert any(kind.endswith("c10d::recv") for kind in received["forward"])
