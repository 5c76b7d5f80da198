"""partition: cuts are as good as those of brute force, and the result says what they cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.errors import ToolError
from amanda.tools.partition import PartitionError, PartitionResult, PartitionTool
from amanda.tools.partition._cut import bubble_share, schedule_slots
from amanda.tools.partition._step_work import StepWork
from amanda.tools.trace import TraceTool
from amanda.tools.view import to_page


class Branches(nn.Module):
    """Two branches of linear layers whose widths a seed chooses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        widths = np.random.default_rng(seed).integers(8, 64, 6).tolist()
        self.left = nn.Sequential(nn.Linear(16, widths[0]), nn.ReLU(), nn.Linear(widths[0], widths[1]))
        self.right = nn.Sequential(nn.Linear(16, widths[2]), nn.Linear(widths[2], widths[3]))
        self.top = nn.Sequential(nn.Linear(widths[1] + widths[3], widths[4]), nn.Linear(widths[4], 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.top(torch.cat([self.left(x), self.right(x)], 1))
        return output


def run(model: nn.Module, x: Tensor, backward: bool = False, **options: Any) -> PartitionResult:
    tool: PartitionTool[PartitionResult] = PartitionTool(**options)
    with amanda.apply(tool):
        y = model(x)
        if backward:
            y.sum().backward()
    return tool.result


def chain(n: int, width: int = 16) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(n)))


def cuts(work: StepWork, stages: int) -> Iterator[np.ndarray]:
    """Yield the stages of the ops in every cut that no tensor crosses backwards."""
    edges = [(span.produced_at, read) for span in work.spans for read in span.read_at]
    for sides in product(range(stages), repeat=len(work.ops)):
        if all(sides[producer] <= sides[read] for producer, read in edges):
            yield np.array(sides)


def loads(work: StepWork, sides: np.ndarray, stages: int) -> list[float]:
    return [float(work.total[sides == stage].sum()) for stage in range(stages)]


def across(work: StepWork, sides: np.ndarray) -> int:
    return sum(
        span.tensor.bytes or 0
        for span in work.spans
        if len({sides[i] for i in (span.produced_at, *span.read_at)}) > 1
    )


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_slowest_stage_is_within_a_tenth_of_brute_force(seed: int, stages: int) -> None:
    result = run(Branches(seed), torch.rand(8, 16), stages=stages, tolerance=0.0)
    best = min(max(loads(result.work, sides, stages)) for sides in cuts(result.work, stages))
    assert max(stage.cost for stage in result.stages) <= 1.1 * best


@pytest.mark.parametrize("seed", range(6))
def test_minimum_cut_sends_as_few_bytes_as_brute_force(seed: int) -> None:
    result = run(Branches(seed), torch.rand(8, 16), method="min_cut", tolerance=0.6)
    allowed = [
        across(result.work, sides) for sides in cuts(result.work, 2)
        if max(loads(result.work, sides, 2)) <= 0.8 * result.work.total.sum()
    ]  # fmt: skip
    assert result.stage_of is not None
    assert max(stage.cost for stage in result.stages) <= 0.8 * result.work.total.sum()
    assert min(allowed) <= across(result.work, result.stage_of) <= 1.5 * min(allowed)


@pytest.mark.parametrize("seed", range(4))
def test_cut_in_order_sends_the_fewest_bytes_within_the_tolerance(seed: int) -> None:
    result = run(Branches(seed), torch.rand(8, 16), stages=2, tolerance=0.3)
    work, count = result.work, len(result.work.ops)
    orders = [np.arange(count) >= start for start in range(1, count)]
    least = min(max(loads(work, sides, 2)) for sides in orders)
    near = [across(work, sides) for sides in orders if max(loads(work, sides, 2)) <= 1.3 * least + 1e-9]
    assert result.stage_of is not None
    assert across(work, result.stage_of) == min(near)


def test_backward_ops_are_in_the_stage_of_their_forward_ops_and_gradients_cross() -> None:
    result = run(chain(4), torch.rand(8, 16), backward=True)
    assert [(crossing.source, crossing.target, crossing.made_by) for crossing in result.crossings] == [
        (0, 1, "linear"), (1, 0, "linear_backward"),
    ]  # fmt: skip
    assert all(stage.backward > stage.forward > 0 for stage in result.stages)


def test_parameters_of_a_stage_are_those_that_its_ops_read() -> None:
    result = run(chain(4), torch.rand(8, 16))
    assert [stage.parameters for stage in result.stages] == [2 * 4 * (16 * 16 + 16)] * 2
    assert [stage.memory for stage in result.stages] == [2176 + 2 * 512 * 2 // 8, 2176 + 2 * 512 // 8]


def test_tied_parameter_is_held_by_both_stages_and_named() -> None:
    model = chain(4)
    model[3].weight = model[0].weight
    result = run(model, torch.rand(8, 16))
    assert result.shared == {"0.weight": [0, 1]}
    assert "add up its gradients: 0.weight (0, 1)" in str(result)


def test_tied_parameter_of_one_stage_counts_once() -> None:
    model = chain(4)
    model[1].weight = model[0].weight
    result = run(model, torch.rand(8, 16))
    assert result.stages[0].parameters == 4 * (256 + 16 + 16)


def test_memory_of_a_device_moves_the_cut() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    free = run(model, torch.rand(8, 64), stages=2)
    assert free.stages[0].ops == 2
    tight = run(model, torch.rand(8, 64), stages=2, copies=1, memory=40_000)
    assert max(stage.memory for stage in tight.stages) <= 40_000
    with pytest.raises(PartitionError, match=r"memory=30,000 .* least that does is (\d+,\d+)") as caught:
        run(model, torch.rand(8, 64), stages=2, memory=30_000).rows()
    least = int(str(caught.value).partition("does is ")[2].partition(":")[0].replace(",", ""))
    assert run(model, torch.rand(8, 64), stages=2, memory=least).rows()


def test_least_memory_of_an_error_is_that_of_the_best_order() -> None:
    model, x = Branches(0), torch.rand(8, 16)
    # 12,712 bytes in the order of execution, 10,960 where the branches are interleaved.
    with pytest.raises(PartitionError, match="least that does is 10,960:"):
        run(model, x, stages=3, copies=1, memory=1).rows()
    assert run(model, x, stages=3, copies=1, memory=10_960).rows()
    with pytest.raises(PartitionError):
        run(model, x, stages=3, copies=1, memory=10_959).rows()


def test_slow_link_moves_the_cut_to_where_few_bytes_cross() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 64))
    result = run(model, torch.rand(8, 16), stages=2, tolerance=0.0, byte_cost=1000.0)
    assert [str(crossing.tensor) for crossing in result.crossings] == ["float32[8,4]"]


def test_measured_time_is_a_cost() -> None:
    result = run(chain(6), torch.rand(8, 16), backward=True, cost="time")
    assert result.work.unit == "s"
    assert 0 < sum(stage.cost for stage in result.stages) < 10
    assert "% of the time" in result.title


def test_cost_is_that_of_one_step() -> None:
    tool, model = PartitionTool(), chain(4)
    with amanda.apply(tool):
        for _ in range(3):
            model(torch.rand(8, 16))
    assert tool.result.work.total.sum() == run(model, torch.rand(8, 16)).work.total.sum()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 8), (4, 4), (4, 16), (3, 2)])
def test_bubble_of_equal_stages(schedule: Any, stages: int, microbatches: int) -> None:
    slots = schedule_slots(schedule, [1.0] * stages, [2.0] * stages, microbatches)
    assert len(slots) == 2 * stages * microbatches
    assert bubble_share(slots, stages) == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_stage_computes_two_micro_batches_at_once_or_before_they_arrive(schedule: Any) -> None:
    slots = schedule_slots(schedule, [1.0, 3.0, 2.0], [2.0, 5.0, 4.0], 5)
    ends = {(slot.stage, slot.microbatch, slot.backward): slot.end for slot in slots}
    for slot in slots:
        before = slot.stage + (1 if slot.backward else -1)
        assert slot.begin >= ends.get((before, slot.microbatch, slot.backward), 0.0)
    for slot, other_slot in combinations(slots, 2):
        assert slot.stage != other_slot.stage or slot.end <= other_slot.begin or other_slot.end <= slot.begin


def test_one_forward_one_backward_holds_fewer_activations() -> None:
    results = [run(chain(4), torch.rand(8, 16), schedule=name, stages=2) for name in ("gpipe", "1f1b")]
    assert results[0].stages[0].memory > results[1].stages[0].memory


def test_result_in_its_forms(tmp_path: Path) -> None:
    result = run(chain(4), torch.rand(8, 16), backward=True)
    assert str(result).startswith("2 stages: the slowest has ")
    assert "Cut 1: 512 B forward (linear float32[8,16])" in str(result)
    content = json.loads(result.save(tmp_path / "stages.json").read_text())
    assert {(op["phase"], op["stage"]) for op in content["ops"]} == set(
        product(("forward", "backward"), (0, 1))
    )
    assert list(result.to_pandas()["stage"]) == [0, 1]
    assert "stage 1" in result.save(tmp_path / "stages.svg").read_text()
    assert '"stages":{"0":0,' in result.save(tmp_path / "stages.graph.html").read_text()


def test_view_puts_ops_into_stages_from_files(tmp_path: Path) -> None:
    trace, tool, model, x = TraceTool(), PartitionTool(), chain(4), torch.rand(8, 16)
    with amanda.apply(trace, tool):
        model(x)
    files = [trace.result.save(tmp_path / "trace.json"), tool.result.save(tmp_path / "partition.json")]
    assert '"stages":{"0":0,"1":0,"2":1,"3":1}' in to_page(*files)


def test_nothing_executed() -> None:
    assert str(PartitionTool().result).startswith("No stages: nothing was executed")


def test_clear_forgets() -> None:
    tool = PartitionTool()
    with amanda.apply(tool):
        chain(2)(torch.rand(1, 16))
        tool.clear()
    assert not tool.result.work.ops


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 0}, "stages is 0; give an integer >= 1"),
        ({"cost": "bytes"}, "cost is 'bytes'; give 'flops' or 'time'"),
        ({"tolerance": "little"}, "tolerance is 'little'; give a number from 0 to 1"),
        ({"tolerance": 2.0}, "tolerance is 2.0; give a number from 0 to 1"),
        ({"method": "min_cut", "stages": 3}, "makes 2 stages .* given stages=3"),
    ],
)
def test_options_that_are_none(options: Any, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        PartitionTool(**options)


def test_more_stages_than_ops() -> None:
    with pytest.raises(PartitionError, match="stages=9, but the traced step has 2 forward ops"):
        run(chain(2), torch.rand(1, 16), stages=9).rows()


def test_sides_that_cannot_be_balanced() -> None:
    model = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 2))
    with pytest.raises(
        PartitionError, match=r"no two sides .* tolerance=0.1 of half; the heaviest op has 89.2%"
    ):
        run(model, torch.rand(8, 16), method="min_cut", tolerance=0.1).rows()


def test_variables_of_tensorflow_are_the_parameters_of_stages() -> None:
    tf = pytest.importorskip("tensorflow")
    weights = [tf.Variable(tf.ones((16, 16))) for _ in range(4)]
    tool, x = PartitionTool(stages=2), tf.ones((8, 16))
    with amanda.apply(tool):
        for weight in weights:
            x = x @ weight
    assert [stage.parameters for stage in tool.result.stages] == [2 * 4 * 16 * 16] * 2
