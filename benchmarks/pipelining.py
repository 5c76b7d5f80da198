"""Compare planned cuts into two stages with one by hand in the middle, trained over two processes.

python benchmarks/pipelining.py [MODEL ...] [--rounds N] prints, by model, medians of a training step: the
time that passed, and the processor time of the busier process, which other programs disturb less. All
variants take turns in one run, on one thread for each process.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from _models import let_torchvision_load
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

import amanda
from amanda.tools.partition import PartitionResult, PartitionTool, Plan

RANKS, MICROBATCHES, ROWS = 2, 8, 4


class Logits(nn.Module):
    """A model of transformers that gives its logits alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.model(tokens).logits
        return made


def _made(name: str) -> tuple[nn.Module, Tensor, Tensor, str]:
    """Return a model, a batch and its targets, and the module that begins the second half by hand."""
    let_torchvision_load()
    torch.manual_seed(0)
    rows = ROWS * MICROBATCHES
    if name == "resnet18":
        from torchvision.models import resnet18

        return resnet18(), torch.rand(rows, 3, 64, 64), torch.randint(0, 1000, (rows,)), "layer3"
    import transformers as installed

    transformers: Any = installed
    tokens = torch.randint(0, 4000, (rows, 32))
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    small = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 4000, "tie_word_embeddings": False}
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(bos_token_id=0, eos_token_id=0, **small, **none)
    )
    return Logits(gpt2), tokens, tokens, "model.transformer.h.2"


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def _stepping(stage: Any, schedule: Any, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(stage.submod.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*((x,) if stage.is_first else ()), **({"target": y} if stage.is_last else {}))
        optimizer.step()

    return step


def _plan(model: nn.Module, x: Tensor, y: Tensor, cost: Any) -> PartitionResult:
    tool = PartitionTool(stages=RANKS, cost=cost, schedule="gpipe", microbatches=MICROBATCHES)
    _loss(model(x), y).backward()
    with amanda.apply(tool):
        for _ in range(10 if cost == "time" else 1):
            _loss(model(x), y).backward()
    return tool.result


def _rank(rank: int, folder: str, name: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    model, x, y, middle = _made(name)
    by_hand = pipeline(model, (x[:ROWS],), split_spec={middle: SplitPoint.BEGINNING})
    stage = by_hand.build_stage(rank, torch.device("cpu"))
    steps = {"by hand": _stepping(stage, ScheduleGPipe(stage, MICROBATCHES, _loss), x, y)}
    titles = {}
    for cost in ("flops", "time"):
        model, x, y, _ = _made(name)
        file = Path(folder, f"{cost}.json")
        if rank == 0:
            _plan(model, x[:ROWS], y[:ROWS], cost).save(file)
        dist.barrier()
        planned = Plan.load(file).pipeline(model, (x[:ROWS],))
        stage = planned.stage()
        steps[f"by {cost}"] = _stepping(stage, planned.schedule(stage, _loss), x, y)
        titles[cost] = json.loads(file.read_text())["title"]
    steps["by hand again"] = steps["by hand"]
    passed: dict[str, list[float]] = {variant: [] for variant in steps}
    busier: dict[str, list[float]] = {variant: [] for variant in steps}
    for number in range(rounds + 2):
        for variant, step in steps.items():
            dist.barrier()
            begin, before = perf_counter(), process_time()
            step()
            used = torch.tensor(process_time() - before, dtype=torch.float64)
            dist.all_reduce(used, dist.ReduceOp.MAX)
            if number > 1:
                passed[variant].append(perf_counter() - begin)
                busier[variant].append(used.item())
    if rank == 0:
        Path(folder, "seconds.json").write_text(
            json.dumps({"passed": passed, "busier": busier, "titles": titles})
        )
    dist.destroy_process_group()


def main() -> None:
    """Train each model both ways, and print what a step took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=["resnet18", "gpt2"], metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_rank, (folder, name, options.rounds), nprocs=RANKS)
            told = json.loads(Path(folder, "seconds.json").read_text())
        for cost, title in told["titles"].items():
            print(f"{name} by {cost}: {title}")
        for kind in ("passed", "busier"):
            hand = told[kind]["by hand"]
            for variant, seconds in told[kind].items():
                ratios = sorted(one / other for one, other in zip(seconds, hand, strict=True))
                quarter = len(ratios) // 4
                print(
                    f"  {kind} {variant:14} {1e3 * statistics.median(seconds):7.1f} ms, "
                    f"{statistics.median(ratios):.2f} of by hand "
                    f"({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})"
                )


if __name__ == "__main__":
    main()
