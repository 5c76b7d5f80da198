"""Time that tools add to a training step of two ranks: the first rank's processor time of it."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from _measure import controls, progress, steps_in_turns
from _tools import scopes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amanda
from amanda.tools.flops import FlopsTool

RANKS, LAYERS, WIDTH, ROWS = 2, 8, 256, 64
WRAPPERS = {"DistributedDataParallel": DistributedDataParallel, "FSDP2": fully_shard}


def benchmark() -> dict[str, Any]:
    """Return seconds of steps of the first rank: wrapper -> variant -> one value a round."""
    progress(f"  {RANKS} ranks")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder,), nprocs=RANKS)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    return {"ranks": RANKS, "model": f"{LAYERS} linear layers of {WIDTH}", "seconds": seconds}


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {}
    for name, wrap in WRAPPERS.items():
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        x = torch.randn(ROWS, WIDTH)
        under = controls() | scopes({"empty tool": amanda.Tool, "FlopsTool": FlopsTool})
        # Every rank goes as many rounds in the same order, for they wait for each other.
        found[name] = steps_in_turns(functools.partial(_step, model, optimizer, x), under, least=40)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
