"""One rank of a pipelined training: python pipelined.py MODEL SCHEDULE RANK FOLDER.

FOLDER holds partition.json. Rank 0 also trains the whole model on the same micro-batches, and writes what
both gave to result.pt.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, MICROBATCHES, ROWS = 4, 4, 2


@dataclass(frozen=True)
class Task:
    """A model, its whole batches by step, and the loss of its output."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


class Residual(nn.Module):
    """Two residual blocks with batch normalisation and ops in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))
            for _ in range(4)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu_(block(x.clone()) + x)
        made: Tensor = self.head(x.mean((2, 3)))
        return made


class Tied(nn.Module):
    """A model of tokens whose embedding is the weight of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.register_buffer("scale", torch.full((16,), 0.5), persistent=False)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * mask[..., None]
        made: Tensor = self.head(x)
        return made


class Recurrent(nn.Module):
    """A block that is called four times, so that several stages call it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(4):
            x = x + self.block(x)
        made: Tensor = self.head(x)
        return made


class Logits(nn.Module):
    """A model of transformers that gives its logits alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.model(tokens).logits
        return made


def let_torchvision_load() -> None:
    """Define two ops of torchvision that a CPU build of torch lacks."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)


def task(name: str) -> Task:
    """Return a task; the same at each call."""
    if name not in ("residual", "tied", "recurrent"):
        let_torchvision_load()
    torch.manual_seed(0)
    rows = MICROBATCHES * ROWS
    if name in ("residual", "resnet18"):
        model, side, classes = Residual(), 8, 5
        if name == "resnet18":
            from torchvision.models import resnet18

            model, side, classes = resnet18(num_classes=10), 32, 10
        images = [torch.rand(rows, 3, side, side) for _ in range(STEPS)]
        batches = [(one, torch.randint(0, classes, (rows,))) for one in images]
        return Task(model, batches, nn.functional.cross_entropy)
    tokens = [torch.randint(0, 30, (rows, 16)) for _ in range(STEPS)]

    def next_token(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    if name in ("tied", "recurrent"):
        model = Tied() if name == "tied" else Recurrent()
        return Task(model, [(one, one) for one in tokens], next_token)
    small: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 30}
    import transformers as installed

    transformers: Any = installed
    if name == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        config = transformers.GPT2Config(n_embd=64, bos_token_id=0, eos_token_id=0, **small, **none)
        return Task(Logits(transformers.GPT2LMHeadModel(config)), [(one, one) for one in tokens], next_token)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(hidden_size=64, intermediate_size=128, **small, **none)
    bert = Logits(transformers.BertForSequenceClassification(config))
    batches = [(one, torch.randint(0, 2, (rows,))) for one in tokens]
    return Task(bert, batches, nn.functional.cross_entropy)


def inputs(name: str, x: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments of a model for its tokens or images."""
    return (x, (x > 3).float()) if name == "tied" else (x,)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of both trainings."""
    return torch.optim.Adam(parameters, lr=0.01)


def accumulates(name: str) -> bool:
    """Return True for a training that sums the gradients of two batches, instead of a mean of one."""
    return name == "tied"


def alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process; return the losses of all micro-batches, and the state."""
    given, losses = task(name), []
    stepped = optimizer(given.model.parameters())
    for number, (x, y) in enumerate(given.batches):
        if not accumulates(name) or number % 2 == 0:
            stepped.zero_grad()
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = given.loss(given.model(*inputs(name, part)), target)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        for parameter in given.model.parameters():
            if parameter.grad is not None and not accumulates(name):
                parameter.grad.div_(MICROBATCHES)
        if not accumulates(name) or number % 2:
            stepped.step()
    return losses, given.model.state_dict()


def pipelined(name: str, schedule: Any, folder: Path) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Train this rank's stage; return losses, the whole model's state, and the names of the stage's state."""
    from amanda.tools.partition import Plan

    given, losses = task(name), list[float]()
    plan = replace(Plan.load(folder / "partition.json"), schedule=schedule, microbatches=MICROBATCHES)
    pipeline = plan.pipeline(given.model, inputs(name, given.batches[0][0][:ROWS]))
    stage = pipeline.stage()
    stepped = optimizer(stage.submod.parameters())
    steps = pipeline.schedule(stage, given.loss, scale_grads=not accumulates(name))
    for number, (x, y) in enumerate(given.batches):
        if not accumulates(name) or number % 2 == 0:
            stepped.zero_grad()
        found: list[Tensor] = []
        given_here = inputs(name, x) if stage.is_first else ()
        steps.step(*given_here, **({"target": y, "losses": found} if stage.is_last else {}))
        if not accumulates(name) or number % 2:
            stepped.step()
        losses += [one.item() for one in found]
    names = list(stage.submod.state_dict())
    pipeline.write_back(stage)
    return losses, given.model.state_dict(), names


def differing(name: str, rank: int, folder: Path) -> str:
    """Return the error of ranks that have other plans."""
    from amanda.tools.partition import PartitionError, Plan

    given, plan = task(name), replace(Plan.load(folder / "partition.json"), microbatches=4 + rank)
    try:
        plan.pipeline(given.model, inputs(name, given.batches[0][0][:ROWS])).stage()
    except PartitionError as error:
        return str(error)
    return ""


def main(name: str, schedules: str, rank: int, folder: Path) -> None:
    """Train as the module says."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    size = len(json.loads((folder / "partition.json").read_text())["rows"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    made: dict[str, Any] = {}
    for schedule in schedules.split(","):
        told: list[Any] = [None] * size
        losses, state, names = pipelined(name, schedule, folder)
        dist.all_gather_object(told, (losses, names))
        made[schedule] = {"losses": told[-1][0], "state": state, "names": [one[1] for one in told]}
    made["differing"] = differing(name, rank, folder) if name == "residual" else ""
    dist.destroy_process_group()
    if rank == 0:
        losses, state = alone(name)
        torch.save({**made, "alone": {"losses": losses, "state": state}}, folder / "result.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
