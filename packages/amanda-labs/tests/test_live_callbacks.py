"""Callbacks of transformers' Trainer, Lightning and Keras that log tools while they train."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.live import (
    JSONLinesWriter,
    LiveError,
    LiveTool,
    keras_callback,
    lightning_callback,
    transformers_callback,
)
from amanda.tools.nan import NanTool
from amanda.tools.stats import StatsTool


class MemoryWriter:
    """Keeps the steps and numbers."""

    def __init__(self) -> None:
        self.steps: dict[int, Mapping[str, float]] = {}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        assert step not in self.steps
        self.steps[step] = dict(values)


def steps_of(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


class Interruption(Exception):
    """Ends a training in its midst."""


def fine_tune(
    transformers: Any,
    folder: Path,
    lives: list[LiveTool],
    resume: bool = False,
    fails_at: int = 0,
    **options: Any,
) -> Any:
    """Train a tiny Llama for 12 steps of two batches each, with a checkpoint every 4 steps."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=4, **sizes))
    texts = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 64
    arguments = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 12, "save_steps": 4,
        "use_cpu": True, "report_to": "none", "logging_strategy": "no", "disable_tqdm": True, **options,
    }  # fmt: skip

    class Failing(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == fails_at:
                raise Interruption

    trainer = transformers.Trainer(
        model, transformers.TrainingArguments(str(folder), **arguments), train_dataset=texts,
        eval_dataset=texts[:4], callbacks=[transformers_callback(*lives), Failing()],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the Trainer, on memory that is pinned without a GPU
def test_a_trainer_that_is_resumed_logs_each_step_once(transformers: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    file, result = tmp_path / "stats.jsonl", tmp_path / "stats.json"

    def lives() -> list[LiveTool]:
        tool = StatsTool(module="model.layers.0", type=["linear"], bins=0)
        return [LiveTool(tool, JSONLinesWriter(file), every=2, save=result)]

    interrupted = lives()
    with pytest.raises(Interruption):
        fine_tune(transformers, tmp_path / "out", interrupted, fails_at=7)
    assert steps_of(file) == [2, 4, 6]
    numbers = json.loads(file.read_text().splitlines()[2])
    # From the checkpoint of step 4 on: step 6 is computed again.
    resumed = lives()
    fine_tune(transformers, tmp_path / "out", resumed, resume=True)
    assert steps_of(file) == [2, 4, 6, 8, 10, 12]
    assert json.loads(file.read_text().splitlines()[2]).keys() == numbers.keys()
    name = "stats/model.layers.0.mlp.up_proj.linear/weight L2"
    assert json.loads(file.read_text().splitlines()[2])[name] == pytest.approx(numbers[name], rel=1e-4)
    lead = f"Of step 12 alone: 4 of 8 steps were logged to {file}."
    assert json.loads(result.read_text())["notes"][0] == lead
    assert not resumed[0].is_open


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_trainer_s_evaluation_is_not_in_its_steps(transformers: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with_evaluation, without, findings = MemoryWriter(), MemoryWriter(), MemoryWriter()
    lives = [LiveTool(FlopsTool(), with_evaluation, every=1), LiveTool(NanTool(), findings, every=5)]
    fine_tune(
        transformers, tmp_path, lives, eval_strategy="steps", eval_steps=2, max_steps=5, save_strategy="no"
    )
    fine_tune(transformers, tmp_path, [LiveTool(FlopsTool(), without)], max_steps=5, save_strategy="no")
    assert list(with_evaluation.steps) == [1, 2, 3, 4, 5]
    assert len({values["flops/MACs"] for values in with_evaluation.steps.values()}) == 1
    assert findings.steps[5]["nan/findings"] == 0
    assert not without.steps


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_scope_of_the_program_stays_open_and_closes_after_an_exception(
    transformers: Any, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    live = LiveTool(FlopsTool(), writer := MemoryWriter(), every=3)
    with pytest.raises(Interruption), amanda.apply(live):
        fine_tune(transformers, tmp_path, [live], fails_at=7, save_strategy="no")
    assert list(writer.steps) == [3, 6]
    assert not live.is_open


@pytest.mark.filterwarnings("ignore")  # of Lightning, on torch's names, data workers and its own folders
def test_lightning_steps_are_logged_and_the_scope_closes_after_an_exception(
    operators_of_torchvision: None, tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, fails_at: int = -1) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
            self.fails_at = fails_at

        def training_step(self, batch: Any) -> Any:
            if self.trainer.global_step == self.fails_at:
                raise Interruption
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

        def validation_step(self, batch: Any) -> None:
            self.layers(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(torch.rand(32, 16), torch.arange(32) % 4)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    file = tmp_path / "flops.jsonl"

    def fit(model: Any, live: LiveTool, steps: int, checkpoint: Path | None = None) -> Any:
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        saving = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1
        )
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", callbacks=[lightning_callback(live), saving],
            accumulate_grad_batches=2, limit_val_batches=1, **quiet,
        )  # fmt: skip
        trainer.fit(model, loader, loader, ckpt_path=checkpoint)

    def live() -> LiveTool:
        return LiveTool(FlopsTool(), JSONLinesWriter(file), every=2)

    failing = live()
    with pytest.raises(Interruption):
        fit(Classifier(fails_at=7), failing, 12)
    assert steps_of(file) == [2, 4, 6]
    assert not failing.is_open
    resumed = live()
    fit(Classifier(), resumed, 12, tmp_path / "step=4.ckpt")
    assert steps_of(file) == [2, 4, 6, 8, 10, 12]
    assert not resumed.is_open
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({line["flops/MACs"] for line in lines}) == 1


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras, as it saves
@pytest.mark.parametrize("eagerly", [False, True], ids=["function", "eager"])
def test_keras_steps_are_logged_over_epochs_and_after_a_resume(eagerly: bool, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    file = tmp_path / "stats.jsonl"
    x, y = np.random.default_rng(0).random((32, 4), dtype=np.float32), np.zeros((32, 2), np.float32)

    def model_of(weights: Path | None = None) -> Any:
        if weights is not None:
            return keras.saving.load_model(weights)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2, name="dense")])
        model.compile("adam", "mse", run_eagerly=eagerly)
        return model

    def fit(model: Any, epochs: int, first: int = 0) -> LiveTool:
        tool = StatsTool(module="*dense", type="matmul", bins=0)
        live = LiveTool(tool, JSONLinesWriter(file), every=3)
        model.fit(
            x, y, batch_size=8, epochs=epochs, initial_epoch=first, verbose=0, validation_data=(x, y),
            callbacks=[keras_callback(live)],
        )  # fmt: skip
        assert not live.is_open
        return live

    model = model_of()
    fit(model, epochs=2)  # of four steps each
    assert steps_of(file) == [3, 6]
    model.save(tmp_path / "model.keras")
    live = fit(model_of(tmp_path / "model.keras"), epochs=4, first=2)
    assert steps_of(file) == [3, 6, 9, 12, 15]
    assert any(row.tensor == "output 0" for row in live.result)


def test_a_callback_wants_tools_that_are_logged() -> None:
    with pytest.raises(LiveError, match=r"wants LiveTool\(tool, writer\), not a StatsTool"):
        keras_callback(StatsTool())  # type: ignore[arg-type]
    with pytest.raises(LiveError, match="one LiveTool or several"):
        keras_callback()
