"""Tools that are logged while a program trains: which steps, which numbers, and what the writers leave."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import children
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.errors import FileError
from amanda.tools.flops import FlopsTool
from amanda.tools.inject import InjectTool
from amanda.tools.live import (
    JSONLinesWriter,
    LiveError,
    LiveTool,
    MLflowWriter,
    OpenTelemetryWriter,
    TensorBoardWriter,
    WandbWriter,
    scalars_of,
)
from amanda.tools.nan import NanTool
from amanda.tools.profile import ProfileTool
from amanda.tools.results import Column, Result, merge, restored
from amanda.tools.sentinel import SentinelTool
from amanda.tools.stats import StatsTool


class MemoryWriter:
    """Keeps the numbers of steps."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}
        self.closed = 0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        assert step not in self.steps
        self.steps[step] = dict(values)

    def close(self) -> None:
        self.closed += 1


class Training:
    """A small model, and the loss of one step after another."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(0)
        self.outputs: list[Tensor] = []

    def run(self, steps: int, end: Callable[[], object] = lambda: None) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            output = self.model(torch.rand(3, 4, generator=self.generator))
            output.square().mean().backward()
            self.optimizer.step()
            self.outputs.append(output.detach().clone())
            end()


class CountTool(amanda.Tool):
    """Counts executions, and calls of its routine in all."""

    class Counts(Result):
        name = "counts"
        columns = (
            Column("type"),
            Column("module"),
            Column("calls", number=True),
            Column("note", shown=False),
        )

        def __init__(self, calls: Mapping[tuple[str, str], int]) -> None:
            self.calls = dict(calls)

        def rows(self) -> Any:
            return [(*place, calls, "") for place, calls in self.calls.items()]

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], int] = {}
        self.total = 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.count, outputs=[], place=(context.get_op_type(), context.get_scope()))

    def count(self, place: tuple[str, str]) -> None:
        self.calls[place] = self.calls.get(place, 0) + 1
        self.total += 1

    @property
    def result(self) -> CountTool.Counts:
        return self.Counts(self.calls)

    def clear(self) -> None:
        self.calls.clear()


def test_statistics_are_those_of_the_logged_step_alone() -> None:
    training, writer = Training(), MemoryWriter()
    with amanda.apply(LiveTool(StatsTool(module="2", bins=0), writer, every=3)):
        training.run(7)
    assert list(writer.steps) == [3, 6]
    for step, values in writer.steps.items():
        output = training.outputs[step - 1].double()
        assert values["stats/2.linear/output 0 mean"] == pytest.approx(output.mean().item())
        assert values["stats/2.linear/output 0 std"] == pytest.approx(output.std(correction=0).item())
        assert "stats/2.linear/weight L2" in values
    assert writer.closed == 1


def test_quantiles_that_were_asked_for_are_logged() -> None:
    training, writer = Training(), MemoryWriter()
    asked, default = StatsTool(module="2", type="linear", quantiles=[0.5, 0.9]), StatsTool(module="2")
    with amanda.apply(live := LiveTool(asked, writer, every=3), default):
        training.run(3)
    for row in live.result:
        name = f"stats/2.{row.type}/{row.tensor}"
        assert (writer.steps[3][f"{name} q0.5"], writer.steps[3][f"{name} q0.9"]) == (row.q0_5, row.q0_9)
    assert not [name for name in scalars_of(default.result) if " q" in name]


def test_routines_run_in_logged_steps_alone_and_nothing_is_attached_between() -> None:
    training, tool, attached = Training(), CountTool(), list[bool]()
    from amanda.scope.attachment import attachment

    live = LiveTool(tool, MemoryWriter(), every=5)
    with amanda.apply(live):
        training.run(20, lambda: attached.append(bool(attachment.attached)))
    calls_of_one_step = tool.total / 4
    assert calls_of_one_step == sum(live.result.calls.values()) > 5
    # True where the next step is logged.
    assert attached == [number % 5 == 4 for number in range(1, 21)]


def test_training_is_bit_identical() -> None:
    torch.manual_seed(0)
    alone = Training()
    alone.run(6)
    torch.manual_seed(0)
    logged = Training()
    with amanda.apply(LiveTool(StatsTool(), MemoryWriter(), every=2)):
        logged.run(6)
    assert all(map(torch.equal, alone.outputs, logged.outputs))


@pytest.mark.parametrize("every", [1, 2, 3])
def test_each_step_is_logged_once_whoever_ends_steps(every: int) -> None:
    expected = [step for step in range(1, 8) if step % every == 0]
    training = Training()
    by_optimizer, by_calls, by_both = MemoryWriter(), MemoryWriter(), MemoryWriter()
    with amanda.apply(LiveTool(FlopsTool(), by_optimizer, every)):
        training.run(7)
    live = LiveTool(FlopsTool(), by_calls, every)
    with amanda.apply(live):
        for _ in range(7):
            training.model(torch.rand(3, 4)).sum().backward()
            live.step()
    live = LiveTool(FlopsTool(), by_both, every)
    with amanda.apply(live):
        training.run(7, live.step)
    assert list(by_optimizer.steps) == list(by_calls.steps) == list(by_both.steps) == expected
    assert len({values["flops/FLOPs"] for values in by_optimizer.steps.values()}) == 1


def test_executions_are_steps_without_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Optimizers of other tests may live until a collection of garbage.
    monkeypatch.setattr("amanda.tools.live._tool._has_optimizer", lambda: False)
    model, writer = nn.Linear(4, 2), MemoryWriter()
    live = LiveTool(FlopsTool(), writer, every=2)
    with amanda.apply(live):
        for size in range(1, 7):
            model(torch.rand(size, 4))
    assert list(writer.steps) == [2, 4, 6]
    assert [values["flops/MACs"] for values in writer.steps.values()] == [16, 32, 48]
    assert live.result.total("macs") == 48


@pytest.mark.parametrize(("every", "steps"), [(1, [3, 4]), (3, [3])])
def test_executions_ahead_of_the_optimizer_are_no_steps(
    every: int, steps: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("amanda.tools.live._tool._has_optimizer", lambda: False)
    training, writer = Training(), MemoryWriter()
    live = LiveTool(FlopsTool(), writer, every=every)
    with amanda.apply(live):
        with torch.no_grad():
            for size in (3, 4):
                training.model(torch.rand(size, 4))  # as an evaluation before the training
        training.run(4)
    assert [step for step, values in writer.steps.items() if "flops/FLOPs optimizer" in values] == steps
    # Each step is logged once, so those of the executions that were logged are lost to the training.
    assert ("up to step 2 are of what ran ahead of the first step" in caplog.text) is (every == 1)
    assert f"{len(steps)} of 4 steps were logged" in live.result.lead


def test_an_optimizer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    training, writer = Training(), MemoryWriter()
    live = LiveTool(FlopsTool(), writer, every=2)
    with amanda.apply(live):
        for _ in range(5):  # an evaluation ahead of the training
            training.model(torch.rand(3, 4))
        training.run(4)
    assert list(writer.steps) == [2, 4]


def test_a_function_of_tensorflow_is_logged_by_its_executions() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    variable, writer = tensorflow.Variable(np.ones((4, 2), np.float32)), MemoryWriter()

    @tensorflow.function
    def double(x: Any) -> Any:
        return tensorflow.matmul(x, variable) * 2.0

    live = LiveTool(StatsTool(bins=0, type="matmul"), writer, every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amanda.tools.live._tool._has_optimizer", lambda: False)
        with amanda.apply(live):
            for number in range(1, 6):
                double(number * np.ones((3, 4), np.float32))
    assert list(writer.steps) == [2, 4]
    means = [
        value for values in writer.steps.values() for name, value in values.items() if name.endswith("mean")
    ]
    assert means == [8, 16]


def test_a_run_that_is_resumed_goes_on_after_the_step_of_its_checkpoint() -> None:
    training, writer = Training(), MemoryWriter()
    live = LiveTool(FlopsTool(), writer, every=5)
    live.resume(12)
    with amanda.apply(live):
        training.run(10)
    assert list(writer.steps) == [15, 20]
    assert live.result.lead == "Of step 20 alone: 2 of 10 steps were logged to MemoryWriter."
    live.resume(24)  # the next step is due
    assert live.result.lead == "No step ended."
    with amanda.apply(live):
        training.run(2)
    assert list(writer.steps) == [15, 20, 25]
    assert "1 of 2 steps were logged" in live.result.lead


def test_executions_are_counted_from_the_step_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amanda.tools.live._tool._has_optimizer", lambda: False)
    model, writer = nn.Linear(4, 2), MemoryWriter()
    live = LiveTool(FlopsTool(), writer, every=5)
    for step in (9, 13):
        live.resume(step)
        with amanda.apply(live):
            for size in range(1, 4):
                model(torch.rand(size, 4))
    assert [(step, values["flops/MACs"]) for step, values in writer.steps.items()] == [(10, 8), (15, 16)]


def test_the_first_step_after_a_checkpoint_is_logged_if_it_is_due() -> None:
    training, writer = Training(), MemoryWriter()
    live = LiveTool(FlopsTool(), writer, every=5)
    live.resume(9)
    with amanda.apply(live):
        training.run(7)
    assert list(writer.steps) == [10, 15]


def test_steps_that_come_in_one_call_are_logged_if_a_multiple_is_among_them() -> None:
    training, writer = Training(), MemoryWriter()
    live = LiveTool(FlopsTool(), writer, every=10)
    with amanda.apply(live):
        for number in range(4, 44, 4):
            training.model(torch.rand(3, 4))
            live.step(number)
    assert list(writer.steps) == [12, 20, 32, 40]


def test_nan_is_counted_between_logs_also_in_steps_that_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training, writer = Training(), MemoryWriter()
    live = LiveTool(NanTool(), writer, every=5)
    with amanda.apply(live):
        training.run(6)
        torch.log(-torch.ones(3))  # in step 7
        training.run(5)
    assert {step: values["nan/findings"] for step, values in writer.steps.items()} == {5: 0, 10: 1, 11: 0}
    assert live.result.first.type == "log"
    assert [record.message.startswith("First NaN: log") for record in caplog.records] == [True]


def test_the_sentinel_chooses_its_steps_itself() -> None:
    training, writer = Training(), MemoryWriter()
    live = LiveTool(SentinelTool(budget=None), writer, every=4)
    faults = InjectTool("multi_bit", type="relu", bits=[24, 25], start=5, end=6)
    with amanda.apply(faults, live):
        training.run(9)
    assert [values["sentinel/watched steps"] for values in writer.steps.values()] == [4, 4, 1]
    assert live.result.counts.watched == 9


def test_a_profile_is_logged_by_phase() -> None:
    training, writer = Training(), MemoryWriter()
    with amanda.apply(LiveTool(ProfileTool(), writer, every=2)):
        training.run(4)
    for values in writer.steps.values():
        phases = [values[f"profile/self ms {phase}"] for phase in ("forward", "backward", "optimizer")]
        assert min(phases) > 0
        assert values["profile/self ms"] == pytest.approx(sum(phases))


def test_a_tool_of_others_is_logged_by_the_numbers_of_its_rows() -> None:
    training, writer = Training(), MemoryWriter()
    with amanda.apply(LiveTool(CountTool(), writer, every=2)):
        training.run(2)
    assert writer.steps[2]["counts/0.linear/calls"] == 1


def test_a_result_may_say_itself_what_is_logged() -> None:
    class Total:
        name = "total"

        def scalars(self) -> Mapping[str, float]:
            return {"ops": 3}

    assert scalars_of(Total()) == {"total/ops": 3.0}


def test_columns_choose_numbers_of_rows() -> None:
    training, writer = Training(), MemoryWriter()
    with amanda.apply(LiveTool(FlopsTool(), writer, every=2, columns=["MACs"])):
        training.run(2)
    assert writer.steps[2]["flops/0.linear/MACs"] == 96
    assert writer.steps[2]["flops/0.linear_backward/MACs"] == 96


def test_rows_of_equal_names_are_told_apart() -> None:
    result = CountTool.Counts({("add", ""): 1, ("add", " "): 2})
    assert scalars_of(result) == {"counts/add/calls": 1, "counts/ .add/calls": 2}
    twice = type(
        "Twice", (CountTool.Counts,), {"rows": lambda self: [("add", "", 1, ""), ("add", "", 2, "")]}
    )
    assert scalars_of(twice({})) == {"counts/add/calls": 1, "counts/add-2/calls": 2}


def test_more_numbers_than_the_limit_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    training, writer = Training(), MemoryWriter()
    with amanda.apply(LiveTool(StatsTool(bins=0), writer, every=1, limit=4)):
        training.run(3)
    assert [len(values) for values in writer.steps.values()] == [4, 4, 4]
    assert (
        len([record for record in caplog.records if "of which the first 4 are logged" in record.message]) == 1
    )


def test_what_cannot_be_logged_says_so(tmp_path: Path) -> None:
    class Plain(amanda.Tool):
        pass

    class Lasting(CountTool):
        clear: Any = None

    def message(tool: Any, writer: Any = None, **options: Any) -> str:
        with pytest.raises(LiveError) as caught:
            LiveTool(tool, writer or MemoryWriter(), **options)
        return str(caught.value)

    assert "changes what the program computes" in message(InjectTool("bit_flip"))
    assert "Plain has no result" in message(Plain())
    assert "no method clear()" in message(Lasting())
    assert "no column of numbers 'mena'; did you mean mean" in message(StatsTool(), columns=["mena"])
    assert "scalars(step, values)" in message(StatsTool(), writer="tensorboard")
    assert "scalars(step, values)" in message(StatsTool(), writer=MemoryWriter)
    assert "tool is a LiveTool" in message(LiveTool(StatsTool(), MemoryWriter()))
    assert "ends in none of .csv" in message(StatsTool(), save=tmp_path / "stats.xml")


def test_a_run_without_a_logged_step_says_so() -> None:
    live = LiveTool(StatsTool(), MemoryWriter(), every=50)
    with amanda.apply(live):
        Training().run(3)
    sentence = "No step was logged: 3 ended, and multiples of 50 are logged; every=1 logs each."
    result = live.result
    assert str(result).splitlines()[:2] == ["Statistics of tensors", sentence]
    assert result.headline == sentence.removesuffix(".")
    # Neither a note on an empty result, nor what the text of a file would say instead.
    for text in (str(result), str(restored(result.to_dict())), result.to_html()):
        assert text.count(sentence) == 1
        assert "No tensor was read" not in text
        assert "No op was executed" not in text


def test_the_step_of_the_result_is_told_first_also_of_ranks_and_trees() -> None:
    flops, stats = (LiveTool(tool, MemoryWriter(), every=2) for tool in (FlopsTool(), StatsTool()))
    with amanda.apply(flops, stats):
        Training().run(5)
    sentence = "Of step 4 alone: 2 of 5 steps were logged to MemoryWriter."
    ranks = merge({"rank0": stats.result, "rank1": restored(stats.result.to_dict())})
    for result in (flops.result, stats.result, ranks):
        assert str(result).splitlines()[1] == sentence
        assert str(result).count(sentence) == 1


def test_steps_of_another_thread_are_told_to_be_missing() -> None:
    training, live = Training(), LiveTool(StatsTool(), MemoryWriter(), every=1)
    with amanda.apply(live):
        thread = Thread(target=training.run, args=(3,))
        thread.start()
        thread.join()
    assert live.result.lead.startswith("No step ended: ")
    assert "in the thread of the scope" in live.result.lead


def test_the_result_is_saved_also_after_an_exception(tmp_path: Path) -> None:
    file, writer = tmp_path / "stats.json", MemoryWriter()
    live = LiveTool(StatsTool(module="2"), writer, every=2, save=file)

    def fail() -> None:
        if len(writer.steps) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), amanda.apply(live):
        Training().run(9, fail)
    assert json.loads(file.read_text())["notes"][0].startswith("Of step 4 alone: ")
    assert writer.closed == 1
    assert live._tool_scope.closed
    assert live._counting_scope.closed


def test_json_lines_of_a_killed_process_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    program = f"""
import os, signal
from amanda.tools.live import JSONLinesWriter
writer = JSONLinesWriter({str(file)!r})
for step in range(1, 8):
    writer.scalars(step, {{"loss": float("nan") if step == 3 else 1 / step}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert children.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert lines[2] == {"step": 3, "loss": "nan"}
    # A process that was killed as it wrote leaves a line without an end.
    with file.open("a") as stream:
        stream.write('{"step": 8, "lo')
    resumed = JSONLinesWriter(file)
    for step in (5, 6):
        resumed.scalars(step, {"loss": 0.0})
    resumed.close()
    resumed.scalars(7, {"loss": 0.0})
    resumed.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["step"], line["loss"] == 0) for line in lines[3:]] == [
        (4, False), (5, True), (6, True), (7, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("first_step", "steps"),
    [
        ("start", [2, 4, 6]),
        ("resume", [3, 6, 9, 12, 14, 16, 18]),
        ("step", [3, 6, 9, 12, 13, 14, 16, 18]),
    ],
)
def test_a_run_that_begins_anew_replaces_all_lines(first_step: str, steps: list[int], tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    with amanda.apply(LiveTool(FlopsTool(), JSONLinesWriter(file), every=3)):
        Training().run(15)
    # The earlier run logged steps that this one has and does not log.
    live = LiveTool(FlopsTool(), JSONLinesWriter(file), every=2)
    if first_step == "resume":
        live.resume(12)
    numbers = iter(range(13, 19))
    end = (lambda: live.step(next(numbers))) if first_step == "step" else (lambda: None)
    with amanda.apply(live):
        Training().run(6, end)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == steps


@pytest.mark.parametrize("text", ["remember\nthis\n", '{"loss": 1}\n', "remember"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text)
    # At once: a training would end at its first logged step.
    with pytest.raises(FileError, match="lines that are no steps"):
        JSONLinesWriter(file)
    file.unlink()
    writer = JSONLinesWriter(file)
    file.write_text(text)
    with pytest.raises(FileError, match="lines that are no steps"):
        writer.scalars(1, {"loss": 1.0})
    assert file.read_text() == text


def test_a_folder_of_tensorboard_that_cannot_be_made_is_named_at_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "runs").write_text("")
    with pytest.raises(FileError, match="runs is not a folder"):
        TensorBoardWriter(tmp_path / "runs" / "1")
    assert TensorBoardWriter(tmp_path / "new" / "1").folder == tmp_path / "new" / "1"
    assert not (tmp_path / "new").exists()


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return step and value of each event, by name, as TensorBoard reads them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


@pytest.mark.parametrize("library", ["torch", "tensorflow"])
def test_tensorboard_reads_what_was_written(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip(library)
    monkeypatch.setattr("amanda.tools.live._writers._has_torch_writer", lambda: library == "torch")
    writer = TensorBoardWriter(tmp_path)
    for step in (50, 100, 150):
        writer.scalars(step, {"stats/0.linear/output 0 mean": step / 100, "flops/FLOPs": 3e12})
        if step == 50:
            writer.close()  # of one of two tools that share it
    # It is read while it is written.
    assert read_events(tmp_path)["stats/0.linear/output 0 mean"] == [(50, 0.5), (100, 1.0), (150, 1.5)]
    writer.close()
    resumed = TensorBoardWriter(tmp_path)
    resumed.scalars(100, {"flops/FLOPs": 4e12})
    resumed.close()
    assert [step for step, _ in read_events(tmp_path)["flops/FLOPs"]] == [50, 100]
    assert read_events(tmp_path)["flops/FLOPs"][1][1] == pytest.approx(4e12)
    with amanda.apply(LiveTool(FlopsTool(), TensorBoardWriter(tmp_path), every=2)):
        Training().run(3)  # which begins anew, and logs neither step 50 nor 100
    assert [step for step, _ in read_events(tmp_path)["flops/FLOPs"]] == [2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sqlalchemy, at its import by mlflow
def test_a_run_of_mlflow_has_the_metrics_and_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    writer = MLflowWriter(experiment="watch")
    writer.scalars(50, {"stats/0.linear/weight [0] mean": 0.5})
    writer.close()
    writer.scalars(100, {"stats/0.linear/weight [0] mean": 0.25})
    writer.close()
    assert mlflow.active_run() is None
    run_id = str(writer).split()[1]
    resumed = MLflowWriter(run_id=run_id)
    for step in (100, 150):
        resumed.scalars(step, {"stats/0.linear/weight [0] mean": 0.125})
    resumed.close()
    history = mlflow.MlflowClient().get_metric_history(run_id, "stats/0.linear/weight _0_ mean")
    assert [(metric.step, metric.value) for metric in history] == [(50, 0.5), (100, 0.25), (150, 0.125)]
    with mlflow.start_run() as run:  # a run of the program stays open
        writer = MLflowWriter()
        writer.scalars(1, {"nan/findings": 0})
        writer.close()
        assert mlflow.active_run().info.run_id == run.info.run_id


def test_an_offline_run_of_wandb_has_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    writer = WandbWriter("watch", mode="offline", dir=str(tmp_path))
    for step in (50, 100):
        writer.scalars(step, {"stats/0.linear/output 0 mean": step / 100})
    summary = dict(wandb.run.summary)
    assert summary["stats/0.linear/output 0 mean"] == 1.0
    assert summary["amanda/step"] == 100
    writer.close()
    assert wandb.run is None
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_gauges_of_opentelemetry_have_the_last_numbers() -> None:
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    reader = metrics.export.InMemoryMetricReader()
    writer = OpenTelemetryWriter(metrics.MeterProvider([reader]).get_meter("program"))
    for step in (50, 100):
        writer.scalars(step, {"stats/0.linear/output 0 mean": step / 100, "stats/0.linear/weight L2": 2})
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    points = {
        (metric.name, point.attributes.get("name")): point.value
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert points == {
        ("amanda.stats", "0.linear/output 0 mean"): 1.0,
        ("amanda.stats", "0.linear/weight L2"): 2,
        ("amanda.step", None): 100,
    }


def test_a_tool_in_an_open_scope_is_refused() -> None:
    tool = FlopsTool()
    live = LiveTool(tool, MemoryWriter())
    with (
        pytest.raises(
            LiveError, match=r"this FlopsTool is in an open scope already; .* another FlopsTool\(\)"
        ),
        amanda.apply(tool, live),
    ):
        pass
    with amanda.apply(tool), pytest.raises(LiveError), amanda.apply(live):
        pass
    with amanda.apply(live):
        pass


@pytest.mark.parametrize(
    ("writer", "library"),
    [
        (MLflowWriter, "mlflow-skinny"), (WandbWriter, "wandb"), (TensorBoardWriter, "tensorboard"),
        (OpenTelemetryWriter, "opentelemetry-sdk"),
    ],
)  # fmt: skip
def test_a_writer_without_its_library_says_how_to_install_it(
    writer: Any, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amanda.tools.live._writers._is_installed", lambda name: False)
    with pytest.raises(LiveError, match=f"not installed: pip install {library}"):
        writer()
