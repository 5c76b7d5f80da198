"""What tools add to a training step of two ranks: the first rank's processor time of it."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from _measure import Variant, controls, interleaved, processor_seconds, progress, script
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amanda
from amanda.tools.flops import FlopsTool

RANKS, LAYERS, WIDTH, ROWS = 2, 8, 256, 64
WRAPPERS = {"DistributedDataParallel": DistributedDataParallel, "FSDP2": fully_shard}


def benchmark(quick: bool) -> dict[str, Any]:
    """Wrapper -> variant -> seconds of steps of the first rank."""
    progress(f"  {RANKS} ranks")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, 2 if quick else 60), nprocs=RANKS)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    return {"ranks": RANKS, "model": f"{LAYERS} linear layers of {WIDTH}", "seconds": seconds}


def _rank(rank: int, folder: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {}
    for name, wrap in WRAPPERS.items():
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        x = torch.randn(ROWS, WIDTH)
        tools = {"empty tool": amanda.Tool(), "FlopsTool": FlopsTool()}
        variants: dict[str, Variant] = controls()
        variants |= {title: functools.partial(amanda.apply, tool) for title, tool in tools.items()}
        step = functools.partial(_step, model, optimizer, x)
        # Every rank goes as many rounds in the same order, for they wait for each other.
        found[name] = interleaved(variants, lambda _, step=step: processor_seconds(step), 0.0, rounds)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    script(benchmark, __doc__)
