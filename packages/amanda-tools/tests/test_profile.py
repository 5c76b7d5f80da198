"""The profile of PyTorch: what is counted and timed, what is not in the times, memory, schedules."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler_util import Kernel

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.tools.profile import OpProfile, ProfileResult, ProfileTool
from amanda.tools.profile._recorder import RANGE, DeviceClock, Recorder, Schedule, kernels_in_ranges
from amanda.tools.results import Mergeable
from amanda.tools.select import select


def profiled(program: Callable[[], Any], tool: ProfileTool | None = None) -> ProfileResult:
    tool = tool or ProfileTool()
    with amanda.apply(tool):
        program()
    return tool.result


def place(result: ProfileResult, kind: str, phase: str = "forward") -> OpProfile:
    (profile,) = [candidate for candidate in result.ops if (candidate.type, candidate.phase) == (kind, phase)]
    return profile


def calls(result: ProfileResult, kind: str) -> int:
    return sum(place.calls for place in result.ops if place.type == kind)


class Slow(torch.autograd.Function):
    """An op that takes 20 ms and has two others within it; its backward takes 20 ms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x.relu().exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.02)
        return gradient * 2


def test_an_op_takes_as_long_as_it_takes() -> None:
    x = torch.rand(3, requires_grad=True)
    start = time.perf_counter_ns()
    result = profiled(lambda: Slow.apply(x).sum().backward())  # type: ignore[no-untyped-call]
    whole = time.perf_counter_ns() - start
    for kind, phase in (("Slow", "forward"), ("Slow_backward", "backward")):
        assert 20e6 <= place(result, kind, phase).total < whole
    assert 40 <= result.total() <= result.wall < whole / 1e6


def test_ops_within_an_op_are_not_its_own_time() -> None:
    result = profiled(lambda: Slow.apply(torch.rand(3)))  # type: ignore[no-untyped-call]
    outer, inner = place(result, "Slow"), place(result, "relu").total + place(result, "exp").total
    assert 0 < inner == outer.total - outer.own
    assert result.total() == pytest.approx((place(result, "rand").total + outer.total) / 1e6)


class Sleeping(amanda.Tool):
    """Takes 10 ms before and after each op, forward and backward."""

    def __init__(self) -> None:
        self.add_inst_for_op(lambda context: context.insert_before_op(self.sleep))
        self.add_inst_for_op(lambda context: context.insert_after_op(self.sleep), require_outputs=True)
        self.add_inst_for_op(self.backward, backward=True)

    def backward(self, context: amanda.OpContext) -> None:
        context.insert_before_backward_op(self.sleep)
        context.insert_after_backward_op(self.sleep)

    def sleep(self, *_: Any) -> None:
        time.sleep(0.01)


@pytest.mark.parametrize("order", ["before it", "after it", "in a scope around", "in a scope within"])
def test_routines_of_other_tools_are_not_in_the_times(order: str) -> None:
    profile, sleeping = ProfileTool(warmup=1, active=3, repeat=1), Sleeping()
    x = torch.rand(3, requires_grad=True)

    def program() -> None:
        for _ in range(4):
            x.relu().sum().backward()

    groups = {
        "before it": [(sleeping, profile)], "after it": [(profile, sleeping)],
        "in a scope around": [(sleeping,), (profile,)], "in a scope within": [(profile,), (sleeping,)],
    }  # fmt: skip
    outer, *inner = groups[order]
    with amanda.apply(*outer), amanda.apply(*(inner[0] if inner else ())):
        program()
    result = profile.result
    assert result.by("phase").rows()[0][1] > 0
    assert max(place.least for place in result.ops) < 10e6  # whatever else delays one of them
    assert result.wall > 3 * 40


def test_an_op_that_raises_leaves_nothing_open() -> None:
    tool = ProfileTool()
    a, b = torch.rand(2, 3), torch.rand(2, 3)

    def failing(x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            a @ b
        return x.relu()

    class Catching(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return failing(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def program() -> None:
        failing(a)
        Catching.apply(a)  # type: ignore[no-untyped-call]

    result = profiled(program, tool)
    assert not calls(result, "matmul")
    outer = place(result, "Catching")
    relus = [place.total for place in result.ops if place.type == "relu"]
    assert len(relus) == 2
    assert outer.total - outer.own in relus
    profiled(lambda: [profiled(lambda: failing(a)) for _ in range(300)], tool)


def test_a_module_that_calls_itself() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            return self(x + 1, depth - 1).exp() if depth else x.relu()

    result = profiled(lambda: Nested()(torch.rand(2), 3))
    assert (calls(result, "add"), calls(result, "exp"), calls(result, "relu")) == (3, 3, 1)
    assert all(place.own == place.total > 0 for place in result.ops)


def test_threads_are_told_apart() -> None:
    tool = ProfileTool()
    numbers: dict[str, int] = {}
    together = threading.Barrier(3)  # a thread that has ended may leave its number to another one

    def work(name: str) -> None:
        numbers[name] = threading.get_native_id()
        together.wait(60)
        for _ in range(50):
            torch.rand(8).relu()

    with amanda.apply(tool) as scope:
        threads = [
            threading.Thread(target=scope.bind(work), args=(name,), name=name) for name in ("left", "right")
        ]
        for thread in threads:
            thread.start()
        work("MainThread")
        for thread in threads:
            thread.join()
    result = tool.result
    assert calls(result, "relu") == calls(result, "rand") == 150
    named = {thread.name: thread.number for thread in result.timeline.threads.values()}
    assert named == numbers
    on = [event.thread for event in result.timeline.events]
    assert sorted(on.count(thread) for thread in result.timeline.threads) == [100, 100, 100]


def test_the_optimizer_is_a_phase_of_its_own() -> None:
    layer = nn.Linear(3, 7)
    optimizer = torch.optim.Adam(layer.parameters())

    def program() -> None:
        layer(torch.rand(2, 3)).sum().backward()
        optimizer.step()

    result = profiled(program)
    assert {row[0] for row in result.by("phase").rows()} == {"forward", "backward", "optimizer"}


def test_training_under_the_tool_is_bit_identical() -> None:
    def trained(tools: list[amanda.Tool]) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten())
        head = nn.Linear(8 * 36, 5)
        parameters = [*model.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        with amanda.apply(*tools):
            for _ in range(4):
                optimizer.zero_grad()
                F.cross_entropy(head(model(torch.rand(2, 3, 8, 8))), torch.tensor([1, 3])).backward()
                optimizer.step()
        return [*parameters, *model.buffers(), torch.get_rng_state()]

    for parameter, other_parameter in zip(trained([]), trained([ProfileTool()]), strict=True):
        assert torch.equal(parameter, other_parameter)


def training(steps: int, tool: ProfileTool | None = None, explicit: bool = False) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.rand(2, 4)  # an op that runs once, ahead of the loop
    for _ in range(steps):
        model(x).sum().backward()
        if tool is not None and explicit:
            tool.step()


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("schedule", "recorded"),
    [
        ({}, range(10)),
        ({"wait": 3}, range(3, 10)),
        ({"wait": 1, "warmup": 1, "active": 2, "repeat": 2}, [2, 3, 6, 7]),
        ({"wait": 1, "active": 2}, [1, 2, 4, 5, 7, 8]),
        ({"warmup": 2, "active": 3, "repeat": 1}, [2, 3, 4]),
    ],
)
def test_a_schedule_says_which_steps_are_recorded(
    schedule: dict[str, int], recorded: list[int], explicit: bool
) -> None:
    tool = ProfileTool(**schedule)
    result = profiled(lambda: training(10, tool, explicit), tool)
    assert [step.number for step in result.timeline.steps] == list(recorded)
    assert calls(result, "linear") == calls(result, "relu_backward") == len(recorded)
    for event in result.timeline.events:
        assert any(step.begin <= event.begin <= event.begin + event.took <= step.end
                   for step in result.timeline.steps)  # fmt: skip


@pytest.mark.parametrize(
    "bad", [{"wait": -1}, {"active": 1.5}, {"repeat": 2}, {"limit": -1}, {"limit": True}]
)
def test_options_that_make_no_sense_are_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(ToolError, match=next(iter(bad))):
        ProfileTool(**bad)


def test_what_is_kept_is_bounded_and_what_is_not_is_said() -> None:
    tool = ProfileTool(limit=20)
    result = profiled(lambda: training(40), tool)
    timeline = result.timeline
    assert len(timeline.events) == 20
    assert len(timeline.steps) <= 20
    assert all(len(history) <= 20 for history in timeline.alive.values())
    assert result.timeline.dropped == sum(place.calls for place in result.ops) - 20
    assert calls(result, "linear") == 40
    assert f"{result.timeline.dropped:,} more are in the table only" in str(result)
    assert result.to_dict()["executions"] == {"kept": 20, "dropped": result.timeline.dropped}


def test_sums_need_no_timeline() -> None:
    result = profiled(lambda: training(5), ProfileTool(limit=0))
    assert calls(result, "linear") == 5
    assert not result.timeline.events
    assert not result.timeline.steps
    assert result.wall > result.total() > 0
    assert "in 5 recorded steps" in str(result)


def test_a_selection_of_ops_is_measured_alone() -> None:
    tool = select(ProfileTool(), module="0")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    result = profiled(lambda: [model(torch.rand(2, 4)).sum().backward() for _ in range(3)], tool)
    assert {place.module for place in result.ops} == {"0"}
    assert {place.calls for place in result.ops} <= {3, 6}


def test_clear_starts_anew() -> None:
    tool = ProfileTool()
    profiled(lambda: training(3), tool)
    before = tool.result
    tool.clear()
    assert not tool.result.ops
    assert calls(profiled(lambda: training(2), tool), "linear") == 2
    assert calls(before, "linear") == 3


def test_ops_that_are_analysed_at_each_execution_are_one_place() -> None:
    tool = ProfileTool()
    with amanda.cache_disabled():
        result = profiled(lambda: training(3), tool)
    assert place(result, "linear").calls == place(result, "relu_backward", "backward").calls == 3


def test_memory_of_a_small_mlp_is_what_one_computes_by_hand() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    x = torch.rand(32, 16)
    result = profiled(lambda: model(x).sum().backward())
    hidden, out, scalar = 32 * 64 * 4, 32 * 8 * 4, 4
    first, second = 4 * (16 * 64 + 64), 4 * (64 * 8 + 8)

    def allocated(kind: str, module: str) -> int | None:
        places = [place for place in result.ops if (place.type, place.module) == (kind, module)]
        return sum(place.allocated or 0 for place in places)

    assert allocated("linear", "0") == allocated("relu", "1") == hidden
    assert allocated("linear", "2") == out
    assert allocated("relu_backward", "1") == hidden
    assert allocated("linear_backward", "0") == first
    assert allocated("linear_backward", "2") == hidden + second
    assert allocated("accumulate_grad", "0") == 0
    (peak,) = result.peaks
    owners = {(owner.type, owner.module): size for owner, size in peak.owners}
    # As the gradient of relu is made: its input is saved, parameters and x are there; so are the gradients
    # of the second layer, and that of the hidden values.
    assert peak.size == sum(owners.values())
    assert owners[peak.owners[-1][0].type, peak.owners[-1][0].module] <= scalar
    assert owners["parameters, inputs, older tensors", ""] == first + second + 32 * 16 * 4
    assert owners["relu", "1"] == hidden
    assert owners["linear_backward", "2"] == hidden + second
    assert owners["relu_backward", "1"] == hidden


def test_views_and_writes_in_place_make_no_memory() -> None:
    def program() -> None:
        x = torch.zeros(10, 10)
        x.t().reshape(100)  # a copy: the transposed one is not contiguous
        x.view(100)[3:].add_(1)

    result = profiled(program)
    sizes = [(place.type, place.allocated or 0) for place in result.ops]
    assert sum(size for _, size in sizes) == 2 * 400
    assert dict(sizes)["zeros"] == 400


def test_what_the_backward_pass_keeps_counts_for_the_op_that_made_it() -> None:
    x = torch.rand(100, 100, requires_grad=True)
    result = profiled(lambda: F.dropout(x, 0.5))
    assert place(result, "dropout").allocated == 2 * 40_000  # its output, and what it multiplied with


def test_tensors_that_died_are_not_at_the_peak() -> None:
    def program() -> None:
        first = torch.zeros(1000)
        del first
        torch.ones(2000)

    (peak,) = profiled(program).peaks
    assert (peak.device, peak.size) == ("cpu", 8000)
    assert [(owner.type, size) for owner, size in peak.owners] == [("ones", 8000)]
    assert "Peak of 8 kB on cpu: 8 kB ones (forward)." in str(profiled(program))


def test_a_sentence_has_the_whole_peak() -> None:
    def program() -> list[Tensor]:
        return [op(1000) for op in (torch.zeros, torch.ones, torch.rand, torch.randn, torch.empty)]

    result = profiled(program)
    text = str(result).split("Peak of ")[1].splitlines()[0]
    assert text.startswith("20 kB on cpu: 4 kB ")
    assert text.endswith("; 8 kB other ops.")


def test_memory_can_be_left_alone() -> None:
    result = profiled(lambda: torch.zeros(1000), ProfileTool(memory=False))
    assert not result.peaks
    assert place(result, "zeros").allocated is None


class Queue:
    """A device that reaches marks when it is told to, half a millisecond apart."""

    def __init__(self) -> None:
        self.count = self.done = 0
        self.waited = False
        self.used_again: list[int] = []

    def record(self, mark: Mark | None) -> Mark:
        if mark is not None:
            self.used_again.append(mark.number)
        self.count += 1
        return Mark(self, self.count)


class Mark:
    """A mark in a queue, in the manner of CUDA's events."""

    def __init__(self, queue: Queue, number: int) -> None:
        self.queue, self.number = queue, number

    def query(self) -> bool:
        return self.number <= self.queue.done

    def synchronize(self) -> None:
        self.queue.waited = self.queue.waited or not self.query()
        self.queue.done = max(self.queue.done, self.number)

    def elapsed_time(self, end: Mark) -> float:
        return 0.5 * (end.number - self.number)


def test_a_device_is_asked_for_times_when_they_are_there_and_waited_for_at_the_end() -> None:
    queue, profile = Queue(), OpProfile("forward", "", "", "")
    clock = DeviceClock(queue.record)
    clock.PENDING_LIMIT = 10
    for _ in range(15):
        clock.end(profile, clock.begin(profile))
    assert profile.device is None
    queue.done = 8
    clock.end(profile, clock.begin(profile))
    assert profile.device == 4 * 500_000
    assert not queue.waited
    clock.end(profile, None)  # where a mark could not be put
    clock.wait()
    assert profile.device == 16 * 500_000
    assert queue.waited
    assert all(clock.begin(profile) is not None for _ in range(40))
    assert sorted(queue.used_again) == list(range(1, 33))


def test_marks_of_a_device_are_put_around_the_op_alone() -> None:
    recorder, clock = Recorder(Schedule(), 10), DeviceClock(Queue().record)
    outer, inner = OpProfile("forward", "outer", "", ""), OpProfile("forward", "inner", "", "", index=1)
    recorder.profiles = {(0, None): outer, (1, None): inner}
    begin, end = recorder.nested_routines(outer, [clock])
    begin_inner, end_inner = recorder.nested_routines(inner, [clock])
    begin()
    begin_inner()
    end_inner()
    end()
    end()  # one that never began
    clock.wait()
    recorder.collect()
    assert (outer.device, inner.device) == (1_500_000, 500_000)
    assert (outer.calls, inner.calls) == (1, 1)


def test_what_torch_saw_within_an_op_is_told_of_it() -> None:
    layer, x = nn.Linear(64, 32), torch.rand(16, 64)
    tool = ProfileTool(kernels=True, active=2, repeat=1)

    def program() -> None:
        for _ in range(4):
            layer(x).relu().sum().backward()

    result = profiled(program, tool)
    rows = {(row[0], row[1], row[4]): row for row in result.kernels().rows()}
    for key in (
        ("forward", "linear", "aten::addmm"), ("forward", "relu", "aten::clamp_min"),
        ("backward", "linear_backward", "aten::mm"), ("backward", "sum_backward", "aten::expand"),
    ):  # fmt: skip
        assert rows[key][5:7] == ("cpu", 2)
    assert ("forward", "relu", "aten::addmm") not in rows
    for place in result.ops:
        assert sum(took for _, took in place.kernels.values()) <= place.total
    assert not torch.autograd.profiler._is_profiler_enabled


def test_kernels_that_cannot_be_told_are_said_to_be_missing() -> None:
    tool = ProfileTool(kernels=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as outer_profile:
        result = profiled(lambda: torch.rand(3).relu(), tool)
    assert calls(result, "relu") == 1
    assert not result.kernels().rows()
    assert "torch.profiler recorded no kernels" in str(result)
    assert "aten::relu" in {event.name for event in outer_profile.events() or ()}


def test_a_result_that_is_read_on_another_thread_leaves_the_kernels_to_the_first_one() -> None:
    tool = ProfileTool(kernels=True)
    with amanda.apply(tool):
        torch.rand(3).relu()
    with ThreadPoolExecutor() as pool:
        assert "on another thread" in str(pool.submit(lambda: tool.result).result())
    assert tool.result.kernels().rows()
    assert not torch.autograd.profiler._is_profiler_enabled


class Traced:
    """An event of torch.profiler, as far as `kernels_in_ranges` reads it; the kernels are those of CUPTI."""

    def __init__(self, name: str, parent: Traced | None = None, kernels: list[Any] | None = None) -> None:
        self.name, self.cpu_parent, self.kernels = name, parent, kernels or []
        self.self_cpu_time_total = 2.0


def test_kernels_belong_to_the_innermost_op_that_launched_them() -> None:
    kernel = Kernel("sgemm", 0, 7.5)
    outer = Traced(RANGE + "3")
    inner = Traced(RANGE + "5", Traced("aten::linear", outer))
    launch = Traced("cudaLaunchKernel", Traced("aten::addmm", inner), [kernel])
    kernels = list(
        kernels_in_ranges([outer, inner, launch, launch.cpu_parent, Traced("aten::mm"), inner.cpu_parent])
    )
    assert kernels == [
        (5, "sgemm", "cuda:0", 7500), (5, "aten::addmm", "cpu", 2000), (3, "aten::linear", "cpu", 2000),
    ]  # fmt: skip


def test_by_groups_and_adds_up() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    result = profiled(lambda: model(torch.rand(3, 4)).sum().backward())
    rows = {row[0]: row for row in result.by("module").rows()}
    assert {"0", "1", "2", ""} == set(rows)
    self_ms = sum(row[3] for row in rows.values())
    assert self_ms == pytest.approx(result.total())
    assert sum(row[5] for row in rows.values()) == pytest.approx(1)
    assert result.to_pandas()["calls"].sum() == sum(place.calls for place in result.ops)
    assert result.wall >= result.total()
    with pytest.raises(AmandaError, match="phase, type, module, source, not colour"):
        result.by("colour")


def test_modules_have_a_time_of_their_own_and_one_with_what_is_in_them() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Sequential(block, nn.Linear(4, 4)), nn.Linear(4, 1))
    result = profiled(lambda: model(torch.rand(3, 4)).sum().backward())
    rows = {row[0]: row for row in result.tree(9).rows()}
    assert list(rows) == ["", "0", "0.0", "0.0.0", "0.0.1", "0.1", "1"]
    _, _, self_ms, total, forward, backward, share, _ = rows["0"]
    assert self_ms == 0
    assert total == pytest.approx(rows["0.0"][3] + rows["0.1"][3])
    assert total == pytest.approx(forward + backward)
    assert rows[""][3] == pytest.approx(result.total())
    assert share == pytest.approx(total / result.total())


def test_files_are_in_the_form_that_their_names_say(tmp_path: Path) -> None:
    result = profiled(lambda: training(2))
    for name in ("a.json", "a.csv", "a.html", "a.txt", "trace.json", "b.trace.json", "b.trace.json.gz"):
        assert result.save(tmp_path / name).stat().st_size
    assert '"schema": "amanda.profile"' in (tmp_path / "a.json").read_text()
    assert (tmp_path / "a.csv").read_text().startswith("phase,type,module,source,calls,total ms,self ms")
    assert '"traceEvents"' in (tmp_path / "trace.json").read_text()
    assert (tmp_path / "b.trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    with pytest.raises(AmandaError, match="no suffix of a form"):
        result.save(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("trace.json", True), ("a.trace.json.gz", True), ("a-trace.rank1.json", True), ("traces.json", False),
     ("a.json", False), ("trace.csv", False)],
)  # fmt: skip
def test_the_name_of_a_file_says_whether_it_is_a_timeline(tmp_path: Path, name: str, meant: bool) -> None:
    saved = profiled(lambda: torch.rand(3)).save(tmp_path / name).read_bytes()
    assert (saved[:2] == b"\x1f\x8b" or b"traceEvents" in saved) == meant


def test_results_of_several_processes_are_one() -> None:
    def program() -> None:
        nn.Linear(4, 4)(torch.rand(2, 4)).sum().backward()

    tool = ProfileTool(kernels=True)
    first, second = profiled(program, tool), profiled(program)
    again = ProfileResult.from_dict(json.loads(second.to_json()))
    assert again.to_dict()["rows"] == second.to_dict()["rows"]
    assert again.to_dict()["peaks"] == second.to_dict()["peaks"]
    both = first.merged(again)
    assert isinstance(both, Mergeable)
    assert both.total() == pytest.approx(first.total() + second.total())
    assert both.wall == pytest.approx(first.wall + second.wall)
    assert calls(both, "linear") == 2
    linear = place(both, "linear")
    assert linear.least == min(place(first, "linear").least, place(second, "linear").least)
    assert linear.allocated == 2 * (place(first, "linear").allocated or 0)
    assert linear.kernels == place(first, "linear").kernels != {}
    assert [peak.size for peak in both.peaks] == [first.peaks[0].size, second.peaks[0].size]
    assert sum(row[-1] or 0 for row in both.rows()) == sum(
        size for peak in both.peaks for owner, size in peak.owners if owner.phase != "given"
    )
    assert len(both.timeline.events) == len(first.timeline.events)
    with pytest.raises(ValueError, match=r"amanda\.profile"):
        ProfileResult.from_dict({"schema": "amanda.flops", "version": 1})
