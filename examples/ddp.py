"""Training over ranks under tools, whose results are gathered.

torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py --sharded
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.results import gather
from amanda.tools.stats import StatsTool


def network() -> nn.Sequential:
    """The same in each rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def batches(rank: int, ranks: int, steps: int = 3, rows: int = 16) -> list[torch.Tensor]:
    """The share of a rank of every batch; of all the same, whatever the number of ranks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 16, generator=generator).chunk(ranks)[rank] for _ in range(steps)]


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """A loss for each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(sharded: bool) -> None:
    """Train in this rank of an initialised group, and tell once what all ranks have done."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = fully_shard(network()) if sharded else DistributedDataParallel(network())
    share = batches(rank, ranks)

    flops, stats = FlopsTool(), StatsTool(bins=0)
    with amanda.apply(flops, stats):
        losses = train(model, share)
    print(f"rank {rank}: losses {losses}")

    each = gather(flops.result.by("phase"), per_rank=True)
    counted, measured = gather(flops.result, to=0), gather(stats.result, to=0)
    if rank == 0:
        print(each, counted.by("phase", "type"), measured, sep="\n\n")


def main() -> None:
    """Begin and end with the launcher's ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sharded", action="store_true", help="FSDP2 in the place of DDP")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(options.sharded)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
