"""Training over ranks, each with one stage of a model that a plan cut; one process trains to the same bits.

torchrun --nproc-per-node 2 examples/pipeline.py
torchrun --nproc-per-node 4 examples/pipeline.py --schedule gpipe
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import amanda
from amanda.tools.partition import PartitionTool, Plan

MICROBATCHES = 4


def network() -> nn.Sequential:
    """Return the same model in each rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))


def batches(steps: int = 3, rows: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets, the same in each rank."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 64, generator=generator), torch.zeros(rows, 64)) for _ in range(steps)]


def planned(stages: int, schedule: str) -> Plan:
    """Return a plan, of one micro-batch; `cost="time"` would be other in each rank: load one file there."""
    model, x = network(), batches()[0][0]
    partition = PartitionTool(stages=stages, schedule=schedule, microbatches=MICROBATCHES)
    with amanda.apply(partition):
        model(x.chunk(MICROBATCHES)[0]).square().mean().backward()
    return partition.result.plan


def pipelined(plan: Plan) -> tuple[nn.Module, list[float]]:
    """Train this rank's stage; return the whole trained model, and losses where the last stage is."""
    model, losses = network(), list[float]()
    pipeline = plan.pipeline(model, batches()[0][0].chunk(MICROBATCHES)[:1])
    stage = pipeline.stage()
    schedule = pipeline.schedule(stage, nn.functional.mse_loss)
    optimizer = torch.optim.Adam(stage.submod.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        of_step: list[Tensor] = []
        if stage.is_first:
            schedule.step(x)
        elif stage.is_last:
            schedule.step(target=y, losses=of_step)
        else:
            schedule.step()
        optimizer.step()
        losses += [one.item() for one in of_step]
    pipeline.write_back(stage)
    return model, losses


def alone() -> tuple[nn.Module, list[float]]:
    """Train the model in this process; return it, and the losses of micro-batches."""
    model, losses = network(), []
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = nn.functional.mse_loss(model(part), target)
            loss.backward()
            losses.append(loss.item())
        for parameter in model.parameters():
            parameter.grad.div_(MICROBATCHES)
        optimizer.step()
    return model, losses


def main() -> None:
    """Begin and end with the launcher's ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, losses = pipelined(planned(ranks, options.schedule))
    dist.destroy_process_group()
    if losses:
        reference, wanted = alone()
        state, expected = model.state_dict(), reference.state_dict()
        same = losses == wanted and all(torch.equal(state[name], expected[name]) for name in expected)
        print(f"rank {rank}: losses {losses[::MICROBATCHES]}, as in one process: {same}")


if __name__ == "__main__":
    main()
