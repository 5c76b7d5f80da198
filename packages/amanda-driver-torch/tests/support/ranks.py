"""Training in ranks of gloo, bare and in a scope; each rank tells in a file what came of it."""

from __future__ import annotations

import functools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import amanda

SIZE = 2
RankResults = dict[str, Any]


def results_of_ranks(folder: Path) -> list[RankResults]:
    """What each rank tells of every training."""
    spawn: Any = torch.multiprocessing.spawn
    ranks = spawn(_rank, (str(folder),), nprocs=SIZE, join=False)
    with children.killed(ranks.processes):
        while not ranks.join(timeout=children.LIMIT):  # is back whenever a rank has ended
            pass
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def _rank(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=SIZE)
    results = {name: train_bare_and_observed(build) for name, build in TRAININGS.items()}
    results["masked"] = masked()
    results["collectives"] = collectives(rank)
    results["pipeline"] = pipeline(rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


class Watcher(amanda.Tool):
    """Sees each op at every point, with routines that change nothing."""

    def __init__(self) -> None:
        self.forward: dict[int, str] = {}
        self.backward: dict[int, str] = {}
        self.calls = 0
        self.add_inst_for_op(self.at_forward)
        self.add_inst_for_op(self.at_backward, backward=True)

    def at_forward(self, context: amanda.OpContext) -> None:
        self.forward[context.get_op_id()] = f"{context.get_scope()}:{context.get_op_type()}"
        context.insert_before_op(self.same)
        context.insert_after_op(self.same)

    def at_backward(self, context: amanda.OpContext) -> None:
        name = f"{context.get_scope()}:{context.get_backward_op().__name__}"
        self.backward[context.get_backward_op_id() or 0] = name
        context.insert_before_backward_op(self.same)
        context.insert_after_backward_op(self.same)

    def same(self, *values: Any) -> None:
        self.calls += 1


class Block(nn.Module):
    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(16) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(torch.relu(self.norm(self.first(x))))


class Net(nn.Module):
    """recompute: blocks are checkpoints.  skips: the last layer is used in every other call alone."""

    def __init__(self, recompute: bool = False, skips: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.head, self.calls = nn.Linear(8, 3), 0
        self.recompute, self.skips = recompute, skips
        self.alternate = nn.Linear(8, 3) if skips else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        self.calls += 1
        return self.alternate(x) if self.alternate and self.calls % 2 == 0 else self.head(x)


def hooked() -> nn.Module:
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def sharded(model: Net | None = None, **options: Any) -> nn.Module:
    model = model or Net()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def tensor_parallel() -> nn.Module:
    model, mesh = Net(norm=False), init_device_mesh("cpu", (SIZE,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
    return model


Build = Callable[[], nn.Module]
TRAININGS: dict[str, Build] = {
    "DDP": lambda: DDP(Net()),
    "DDP, static graph, views of buckets": lambda: DDP(
        Net(recompute=True), static_graph=True, gradient_as_bucket_view=True
    ),
    "DDP, small buckets": lambda: DDP(Net(), bucket_cap_mb=1e-4),
    "DDP, unused parameters": lambda: DDP(Net(skips=True), find_unused_parameters=True),
    "DDP, accumulating": lambda: DDP(Net()),
    "DDP, communication hook": hooked,
    "DDP, bfloat16": lambda: DDP(Net()),
    "DDP, checkpoints": lambda: DDP(Net(recompute=True)),
    "FSDP2": sharded,
    "FSDP2, not resharded": functools.partial(sharded, reshard_after_forward=False),
    "FSDP2, mixed precision": functools.partial(
        sharded, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "FSDP2, checkpoints": lambda: sharded(Net(recompute=True)),
    "tensor parallel": tensor_parallel,
}


def whole(tensor: Any) -> torch.Tensor | None:
    return tensor.full_tensor().detach().clone() if hasattr(tensor, "full_tensor") else tensor


def train(model: nn.Module, name: str = "", steps: int = 3) -> list[Any]:
    """Losses, gradients of each step, and the parameters in the end; what hangs on them is told too."""
    tensors: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        generator = torch.Generator().manual_seed(
            100 * step + (0 if name == "tensor parallel" else dist.get_rank())
        )
        x, y = torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)
        optimizer.zero_grad()
        if name == "DDP, accumulating":
            with model.no_sync():  # type: ignore[operator]
                cross_entropy(model(x), y).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in name):
            loss = cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        tensors += [
            loss.detach(),
            *(None if p.grad is None else p.grad.detach().clone() for p in model.parameters()),
        ]
    tensors += [p.detach().clone() for p in model.parameters()]
    return [*map(whole, tensors), remains(model)]


def remains(model: nn.Module) -> list[Any]:
    """What Python can see on modules and parameters besides their values."""
    modules = [(sorted(vars(m)), len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()]
    return [
        modules,
        [sorted(getattr(p, "__dict__", {})) for p in model.parameters()],
        sorted(model.state_dict()),
    ]


def same(tensor: Any, expected: Any) -> bool:
    if isinstance(tensor, torch.Tensor) and isinstance(expected, torch.Tensor):
        return tensor.dtype == expected.dtype and torch.equal(
            tensor.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)
        )
    if isinstance(tensor, list) and isinstance(expected, list):
        return len(tensor) == len(expected) and all(map(same, tensor, expected))
    return bool(tensor == expected)


def train_bare_and_observed(build: Build) -> RankResults:
    name = next(name for name, each in TRAININGS.items() if each is build)

    def run() -> list[Any]:
        torch.manual_seed(0)
        return train(build(), name)

    bare, watcher = run(), Watcher()
    with amanda.apply(watcher) as scope:
        observed = run()
    return {
        "bare again": same(run(), bare), "same": same(observed, bare), "calls": watcher.calls,
        "forward": {str(key): kind for key, kind in watcher.forward.items()},
        "backward": {str(key): kind for key, kind in watcher.backward.items()},
        "report": [entry.what for entry in scope.report],
    }  # fmt: skip


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return weight * mask

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def mask_of(weight: torch.Tensor) -> torch.Tensor:
    return (torch.arange(weight.numel()).reshape(weight.shape) % 2).to(weight.dtype)


class MaskedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, Through.apply(self.weight, mask_of(self.weight)), self.bias)


class Masks(amanda.Tool):
    """Masks the weight of every linear layer."""

    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            mask = mask_of(context.get_value("weight"))
            context.insert_before_op(lambda weight: weight * mask, inputs=["weight"])


def masked() -> RankResults:
    """A tool that changes values, against layers that do so by hand; parameters of all ranks are told."""
    results: RankResults = {}
    for name, wrap in (("DDP", DDP), ("FSDP2", sharded)):
        torch.manual_seed(0)
        by_hand = Net()
        for module in by_hand.modules():
            if type(module) is nn.Linear:
                module.__class__ = MaskedLinear
        expected = train(wrap(by_hand))[:-1]
        torch.manual_seed(0)
        with amanda.apply(Masks()):
            parameters = train(wrap(Net()))[:-1]
        results[name] = {
            "same": same(parameters, expected),
            "parameters": [p.tolist() for p in parameters[-14:]],
        }
    return results


class Doubled(amanda.Tool):
    """Doubles what collectives are given, and keeps what they give."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.results: list[float] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        kind = context.get_op_type()
        if "c10d" not in kind:
            return
        self.ops.append(kind)
        if kind == "c10d::all_reduce":
            context.insert_before_op(lambda tensors: [[2 * tensor for tensor in tensors]], inputs=["tensors"])
        if kind == "c10d::all_gather":
            assert len(context.get_inputs()[1]) == SIZE  # one list, which torch has as a list of lists
            context.insert_before_op(
                lambda tensors: [[3 * tensor for tensor in tensors]], inputs=["input_tensors"]
            )
        if kind == "_c10d_functional::all_reduce":
            context.insert_after_op(lambda value: self.results.append(value.sum().item()))


def collectives(rank: int) -> RankResults:
    tool, x = Doubled(), torch.full((3,), rank + 1.0)
    parts, rows = [torch.zeros(3) for _ in range(SIZE)], torch.zeros(3 * SIZE)
    with amanda.apply(tool) as scope:
        for _ in range(2):
            y = x.clone()
            dist.all_reduce(y)
            waited = y.clone()
            dist.all_reduce(waited, async_op=True).wait()
            dist.all_gather(parts, x)
            dist.all_gather_into_tensor(rows, x)
            dist.broadcast(y, 0)
            dist.send(y, 1) if rank == 0 else dist.recv(y, 0)
            time.sleep(0.2 * rank)  # the other has begun, and nothing is there yet
            total = functional.all_reduce(x, "sum", dist.group.WORLD) + 0
    return {
        "ops": tool.ops, "given": tool.results, "reduced": y.tolist(), "waited": waited.tolist(),
        "gathered": [part.tolist() for part in parts], "rows": rows.tolist(), "total": total.tolist(),
        "report": [entry.what for entry in scope.report],
    }  # fmt: skip


def pipeline(rank: int) -> RankResults:
    """Two stages of a pipeline, two microbatches."""

    def run() -> list[Any]:
        torch.manual_seed(0)
        blocks = [Block(), Block()]
        stage = PipelineStage(blocks[rank], rank, SIZE, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
        x, losses = torch.randn(4, 8), []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.zeros(4, 8), losses=losses)
        return [*losses, *(p.grad for p in blocks[rank].parameters())]

    bare, watcher = run(), Watcher()
    with amanda.apply(watcher):
        observed = run()
    return {"same": same(observed, bare), "forward": list(watcher.forward.values()),
            "backward": list(watcher.backward.values())}  # fmt: skip
