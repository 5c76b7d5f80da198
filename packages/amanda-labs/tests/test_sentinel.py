"""The sentinel: injected faults are found where they are, and training is what it is without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.errors import ToolError
from amanda.tools.inject import InjectTool
from amanda.tools.results import load
from amanda.tools.select import select
from amanda.tools.sentinel import SentinelError, SentinelTool, _reruns
from amanda.tools.sentinel._reruns import compare_reruns as compare
from amanda.tools.sentinel._result import NormHistory, compare_hashes
from amanda.tools.sentinel._tool import Budget

X = torch.rand(16, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Convolution, normalisation, attention and dropout, so that ops of every kind are met."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x)).relu_()
        heads = hidden.view(2, 8, 16)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        result: Tensor = self.outer(self.dropout(attended.reshape(16, 16)))
        return result


def train(steps: int, *tools: amanda.Tool, each: Callable[[int, Net], None] = lambda step, net: None) -> Net:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    with amanda.apply(*tools):
        for step in range(steps):
            each(step, net)
            optimizer.zero_grad()
            net(X).square().mean().backward()
            optimizer.step()
    return net


def watching(**options: Any) -> SentinelTool:
    return SentinelTool(**{"budget": None, "share": 1.0, **options})


@pytest.mark.parametrize("options", [{"budget": None, "share": 1.0}, {"budget": 0.3, "share": 0.5}])
def test_training_is_the_same_to_the_bit(options: dict[str, Any]) -> None:
    bare, drawn = train(12), torch.rand(1)
    sentinel = SentinelTool(**options)
    watched = train(12, sentinel)
    assert torch.equal(torch.rand(1), drawn)
    for value, watched_value in zip(bare.state_dict().values(), watched.state_dict().values(), strict=True):
        assert torch.equal(value, watched_value)
    result = sentinel.result
    assert not result
    assert result.counts.steps == 12
    assert result.notes()[0].startswith("No alarm: ")


def test_ops_that_are_random_or_write_are_left_and_counted() -> None:
    sentinel = watching()
    train(3, sentinel)
    by_type = {op.type: op for op in sentinel.result.ops if op.phase == "forward"}
    assert by_type["dropout"].left == "random"
    assert by_type["relu"].left == "in place, or into out="
    assert by_type["scaled_dot_product_attention"].recomputed == by_type["batch_norm"].recomputed == 3
    assert sentinel.result.left["random"] == 3
    assert {op.type for op in sentinel.result.ops if op.phase == "backward" and op.recomputed == 3} >= {
        "linear_backward", "batch_norm_backward", "softmax_backward", "matmul_backward", "pow_backward",
    }  # fmt: skip


FAULTS = [
    {"fault": "bit_flip"}, {"fault": "multi_bit", "flips": 3}, {"fault": "wrong_row"},
    {"fault": "stuck_at_1", "axis": -1, "bits": [30], "permanent": True},
    {"fault": "nan", "probability": 0.1}, {"fault": "uniform", "axis": 0},
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["fault"])
@pytest.mark.parametrize("target", ["outputs", "grad_inputs"])
def test_a_fault_in_a_step_is_found_at_its_op(fault: dict[str, Any], target: Any) -> None:
    faults = InjectTool(**fault, target=target, type="linear", module="outer", start=4, end=5)
    sentinel = watching()
    train(7, faults, sentinel)
    assert faults.result.total
    (first, *later_alarms) = [alarm for alarm in sentinel.result.alarms if alarm.kind == "corruption"]
    assert (first.step, first.module, later_alarms) == (4, "outer", [])
    assert first.type == ("linear" if target == "outputs" else "linear_backward")
    if fault["fault"] not in ("nan", "stuck_at_1"):  # bits that are stuck may be as they were
        assert f"{faults.result.total:,} of" in first.detail


@pytest.mark.parametrize("seed", range(3))
def test_the_tool_looks_at_a_share_of_the_ops_of_each_watched_step(seed: int) -> None:
    sentinel = watching(share=0.25, seed=seed)
    train(4, sentinel)
    able = [op for op in sentinel.result.ops if not op.left]
    assert 0.5 * len(able) <= sum(op.recomputed for op in able) <= len(able)  # some ops make views alone
    assert sum(op.recomputed > 0 for op in able) > len(able) / 4  # not the same ones in each step
    assert 0 < sum(len(op.norms) > 0 for op in sentinel.result.ops) < len(sentinel.result.ops)


def test_a_step_is_watched_whole_after_the_first_nan() -> None:
    def spoil(step: int, net: Net) -> None:
        if step == 40:
            net.inner.bias.data[1] = float("nan")

    sentinel = watching(share=0.1)
    train(48, sentinel, each=spoil)
    alarms = [alarm for alarm in sentinel.result.alarms if alarm.kind == "nan"]
    assert all(alarm.step >= 40 for alarm in alarms)
    first = next(alarm for alarm in alarms if alarm.module == "inner" and alarm.phase == "forward")
    assert first.detail.startswith("parameter inner.")
    assert first.step <= alarms[0].step + 1
    assert sentinel.result.left["random"] == 48
    with_norms = sum(len(op.norms) > 0 for op in sentinel.result.ops)
    assert with_norms > 0.8 * len(sentinel.result.ops)


def test_recall_is_the_share_of_the_ops_that_run_again() -> None:
    from scipy.stats import binomtest

    steps = 200
    faults = InjectTool("bit_flip", type="linear", field="mantissa")
    sentinel = watching(share=0.3, limit=10)
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    with torch.no_grad(), amanda.apply(faults, sentinel):
        for _ in range(steps):
            layer(X[:, :4])
            sentinel.step()
    (op,) = [op_record for op_record in sentinel.result.ops if op_record.type == "linear"]
    assert op.executions == steps
    assert op.corrupt == op.recomputed  # each execution had a fault
    assert binomtest(op.corrupt, steps, 0.3).pvalue > 1e-3
    assert len(sentinel.result.alarms) == 10
    assert "further alarms" in sentinel.result.notes()[0]


@pytest.mark.parametrize(("target", "phase"), [("outputs", "forward"), ("grad_inputs", "backward")])
def test_nan_is_told_with_the_op_at_which_it_begins(target: Any, phase: str) -> None:
    faults = InjectTool("nan", target=target, type="batch_norm", start=5, end=6)
    sentinel = watching()
    train(6, faults, sentinel)
    (alarm,) = [candidate for candidate in sentinel.result.alarms if candidate.kind == "nan"]
    assert (alarm.kind, alarm.step, alarm.phase, alarm.module) == ("nan", 5, phase, "norm")
    assert sentinel.result.counts.followed > 0 or phase == "backward"  # nothing reads a weight's gradient


def test_nan_that_a_parameter_holds_is_told_as_such() -> None:
    def spoil(step: int, net: Net) -> None:
        if step == 3:
            net.outer.bias.detach().numpy()[1] = float("nan")

    sentinel = watching()
    train(4, sentinel, each=spoil)
    (alarm,) = sentinel.result.alarms
    assert (alarm.step, alarm.type, alarm.module) == (3, "linear", "outer")
    assert alarm.detail == "parameter outer.bias is the first to hold NaN, an input of the op"


def test_nan_that_a_write_puts_into_a_parameter_is_told_where_it_is_written() -> None:
    def spoil(step: int, net: Net) -> None:
        if step == 3:
            net.outer.bias.data[1] = float("nan")

    sentinel = watching()
    train(4, sentinel, each=spoil)
    (alarm,) = sentinel.result.alarms
    assert (alarm.step, alarm.type, alarm.module) == (3, "setitem", "")
    assert alarm.detail == "output 0 is the first to hold NaN"


def test_nan_after_the_last_watched_step_is_told_as_the_scope_closes() -> None:
    def spoil(step: int, net: Net) -> None:
        if step == 5:
            with torch.no_grad():
                net.outer.weight[0, 0] = float("nan")

    sentinel = SentinelTool(budget=1e-9)  # watches no step
    train(8, sentinel, each=spoil)
    (alarm,) = sentinel.result.alarms
    assert sentinel.result.counts.watched == 0
    assert (alarm.kind, alarm.step) == ("nan", 8)
    assert "parameters hold NaN or infinity as the scope closes" in alarm.detail
    assert "it began in a step that was not watched" in alarm.detail


def test_a_spike_is_told_with_the_op_at_which_it_begins() -> None:
    faults = InjectTool("value", value=1e6, type="batch_norm", start=20, end=21)
    sentinel = watching()
    train(24, faults, sentinel)
    alarm = next(candidate for candidate in sentinel.result.alarms if candidate.kind == "spike")
    assert (alarm.step, alarm.type) == (20, "batch_norm")
    assert all(candidate.step >= 20 for candidate in sentinel.result.alarms)


def test_distances_are_robust_deviations_of_logarithms() -> None:
    spikes = NormHistory(window=16)
    first_norms = [1.0, 1.1, 0.9, 1.0, 1.2, 0.0, 1.0, 1.1, 0.9]
    assert [spikes.measure_and_add(norm) for norm in first_norms] == [0.0] * 9
    assert spikes.measure_and_add(1e9) > 100
    assert abs(spikes.measure_and_add(1.0)) < 1
    assert spikes.measure_and_add(float("inf")) == float("inf")
    assert spikes.measure_and_add(float("nan")) == 0.0


def test_the_budget_is_kept_at_all_times() -> None:
    budget = Budget(0.01)
    watched = []
    for step in range(20_000):
        watched.append(budget.allows())
        seconds = 0.13 if watched[-1] else 0.1
        budget.step_ended(seconds, 0.02 * watched[-1], watched[-1])
        assert budget.spent / budget.passed <= (0.013 if step > 50 else 0.03)
    assert not any(watched[:9])
    assert 0.005 < budget.spent / budget.passed <= 0.0101
    assert sum(watched) > 100
    assert all(Budget(None).allows() for _ in range(3))


def test_a_stall_in_a_watched_step_is_no_cost_of_watching() -> None:
    budget = Budget(0.01)
    for seconds, is_watched in ((0.1, False), (0.1, False), (0.1, False), (60.0, True)):
        budget.step_ended(seconds, 0.01 * is_watched, is_watched)
    assert budget.spent < 0.2


def test_nothing_is_installed_between_watched_steps() -> None:
    from amanda import interceptor
    from amanda.scope.attachment import attachment

    attached_tools = []

    def each(step: int, net: Net) -> None:
        attached_tools.append(interceptor.active() is not None)
        assert attached_tools[-1] == bool(attachment._attached)

    sentinel = SentinelTool(budget=0.2)
    train(100, sentinel, each=each)
    assert 0 < sum(attached_tools) == sentinel.result.counts.watched < 100


def test_forward_ops_are_analysed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = watching()
    train(1, whole)
    monkeypatch.setattr(Budget, "allowance", 0.0)
    monkeypatch.setattr(Budget, "allows", lambda self: True)
    sentinel, forward = SentinelTool(share=1.0), []

    def each(step: int, net: Net) -> None:
        forward.append(sum(op.phase == "forward" for op in sentinel.result.ops))

    train(25, sentinel, each=each)
    assert len(sentinel.result.ops) == len(whole.result.ops)
    assert all(op.executions > 1 for op in sentinel.result.ops)
    assert {after - before for before, after in pairwise(forward)} <= {0, 1, 2}
    assert not sentinel.result


def test_backward_ops_that_will_be_new_are_saved_for() -> None:
    budget = Budget(0.01)
    for _ in range(30):
        budget.step_ended(0.1, 0.0, False)
    assert budget.allows()
    budget.step_ended(0.11, 0.01, True, is_exhausted=True)
    waited = 0
    while not budget.allows():
        budget.step_ended(0.1, 0.0, False)
        waited += 1
    assert waited == 0  # 0.01 for the step, and as much for backward ops, of 0.03
    budget.step_ended(0.11, 0.01, True, is_exhausted=True)
    while not budget.allows():
        budget.step_ended(0.1, 0.0, False)
        waited += 1
    assert 15 <= waited <= 20  # 0.02 are spent, 0.02 are saved, 0.01 are expected


def test_an_op_that_varies_is_no_corruption() -> None:
    first, others = [torch.zeros(3)], iter(torch.arange(1.0, 5.0))
    assert compare(first, lambda: [next(others) + torch.zeros(3)]) == ("varies", "")
    assert compare(first, lambda: [torch.zeros(3)]) == ("same", "")
    verdict, detail = compare(first, lambda: [torch.ones(3)])
    assert verdict == "corruption"
    assert detail == (
        "3 of 3 elements of output 0 differ from those of a run with the same inputs, by at most 1.0e+00 of "
        "the largest, the first at 0: 0.0 instead of 1.0"
    )
    runs = iter([torch.ones(3), *[torch.zeros(3)] * 3])
    verdict, detail = compare(first, lambda: [next(runs)])
    assert verdict == "corruption"
    assert detail.startswith("the second run of the op is the odd one: ")


def test_ops_that_vary_are_named_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rerun_op = _reruns.rerun_op

    def varying(compute: Any, kind: str, *inputs: Any) -> list[Tensor]:
        outputs = rerun_op(compute, kind, *inputs)
        return [torch.rand(output.shape) for output in outputs] if kind == "batch_norm" else outputs

    monkeypatch.setattr(_reruns, "rerun_op", varying)
    sentinel = watching()
    train(3, sentinel)
    assert not sentinel.result
    assert (
        "Nondeterministic ops, which give no alarms: batch_norm (forward) of norm." in sentinel.result.notes()
    )


def test_inputs_of_an_execution_that_raised_are_not_those_of_the_next() -> None:
    layer, sentinel = nn.Linear(8, 2), watching(share=0.5)
    with amanda.apply(sentinel):
        for step in range(40):
            with pytest.raises(RuntimeError) if step % 2 else nullcontext():
                layer(X if step % 2 == 0 else X[:, :3])
            sentinel.step()
    assert not sentinel.result
    assert sum(op.recomputed for op in sentinel.result.ops) >= 5


def test_overflow_under_a_grad_scaler_is_no_alarm() -> None:
    model = nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1e38)
    sentinel = watching()
    with amanda.apply(sentinel):
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(X[:, :4] * 100).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not sentinel.result
    assert sentinel.result.counts.skipped >= 1


def test_stop_raises_as_the_step_ends() -> None:
    faults = InjectTool("nan", type="linear", module="inner", start=2, end=3)
    sentinel = watching(stop=True)
    with pytest.raises(SentinelError, match=r"corruption in step 2: linear \(forward\) of inner") as raised:
        train(9, faults, sentinel)
    assert raised.value.alarm == sentinel.result.alarms[0]
    assert sentinel.result.counts.steps == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [({"budget": 0.0}, "budget is 0.0"), ({"share": 1.5}, "share is 1.5"), ({"window": 2}, "window is 2")],
)
def test_options_that_cannot_be_are_errors(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolError, match=words):
        SentinelTool(**options)


def test_a_result_is_saved_and_loaded(tmp_path: Path) -> None:
    faults = InjectTool("bit_flip", type="linear", module="outer", start=1, end=2)
    sentinel = watching()
    train(3, faults, sentinel)
    result = sentinel.result
    content = json.loads(result.save(tmp_path / "sentinel.json").read_text())
    assert content["alarms"][0]["step"] == 1
    assert load(tmp_path / "sentinel.json").rows() == [tuple(row) for row in result.rows()]
    assert list(result.to_pandas()["watched"]) == [3] * len(result.ops)
    assert str(result).splitlines()[1].startswith("Alarm: corruption in step 1: linear (forward) of outer")
    sentinel.clear()
    assert not sentinel.result
    assert not sentinel.result.ops


def test_a_selection_is_of_the_ops_that_are_watched() -> None:
    sentinel = select(watching(), type="linear", module="outer")
    train(2, sentinel)
    assert {op.module for op in sentinel.result.ops} == {"outer"}
    assert sentinel.result.ops[0].executions == 2
    with pytest.raises(ToolError, match="chooses the steps"):
        select(watching(), start=1)


def test_a_scope_without_steps_says_so() -> None:
    sentinel = watching()
    with amanda.apply(sentinel):
        nn.Linear(8, 2)(X)
    assert any("No step ended" in remark for remark in sentinel.result.remarks)


@pytest.mark.parametrize(
    ("hashes", "detail"),
    [([[1, 2], [1, 2], [1, 2]], None),
     ([[1, 2], [1, 3], [1, 2]], "rank 1 differs from the other ranks in 1 of 2"),
     ([[1, 2], [1, 3]], "the ranks differ in 1 of 2"),
     ([[1, 2], [3, 2], [4, 2]], "the ranks differ in 1 of 2")],
)  # fmt: skip
def test_a_rank_that_differs_from_most_is_named(hashes: list[list[int]], detail: str | None) -> None:
    alarms = compare_hashes(7, hashes, ["gradient a.weight", "parameter a.weight"])
    assert [alarm.detail.partition(" gradients")[0] for alarm in alarms] == (
        [] if detail is None else [detail]
    )


RANK = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
import amanda
from amanda.tools.sentinel import SentinelTool

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
for faulty in (-1, 1):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sentinel = SentinelTool(budget=None, share=0.0)
    with amanda.apply(sentinel):
        for step in range(6):
            optimizer.zero_grad()
            model(torch.rand(3 + rank, 4)).sum().backward()
            if step == 2 and rank == faulty:
                model.module[2].weight.data[0, 1] += 1e-3
            optimizer.step()
    alarms = [one for one in sentinel.result.alarms if one.kind == "ranks"]
    told = [str(sentinel.result.counts.comparisons), *(f"{one.step} {one.detail}" for one in alarms)]
    Path(sys.argv[1], f"{rank}.{faulty}").write_text(chr(10).join(told))
del model
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "who"),
    [
        (2, "the ranks differ"),
        pytest.param(3, "rank 1 differs from the other ranks", marks=pytest.mark.long),
    ],
)
def test_ranks_that_differ_are_found(tmp_path: Path, size: int, who: str) -> None:
    (tmp_path / "train.py").write_text(RANK)
    launcher = [
        "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost",
    ]  # fmt: skip
    children.run([sys.executable, *launcher, tmp_path / "train.py", tmp_path], check=True, limit=200)
    for rank in range(size):
        comparisons, *alarms = (tmp_path / f"{rank}.-1").read_text().splitlines()
        assert int(comparisons) == 6
        assert not alarms
        first = (tmp_path / f"{rank}.1").read_text().splitlines()[1]
        assert first.startswith(f"2 {who} in 1 of 8 gradients and parameters, first parameter 2.weight")
