"""Compare fault campaigns on one and on two processes with as many bare runs of the model.

python benchmarks/campaigns.py [--trials N] [--rounds N] prints medians of seconds, on one thread for each
process, and their ratios to the bare runs.  All variants take turns in one run; "bare again" is the null
control.  The time of two processes has the start of the workers, which "workers started" leaves out.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from time import perf_counter

import torch
from _measure import AGAIN, BARE
from joblib.externals.loky import get_reusable_executor
from torch import Tensor, nn

from amanda.tools.inject import Campaign, InjectTool, top1_changed


def _program() -> Callable[[], Tensor]:
    """Return a program of about 50 ms: eight linear layers on one thread."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    model, x = nn.Sequential(*layers).eval(), torch.rand(1024, 512)

    def program() -> Tensor:
        with torch.no_grad():
            scores: Tensor = model(x)
        return scores

    return program


def benchmark(trials: int = 200, rounds: int = 3) -> dict[str, dict[str, float]]:
    """Return seconds and the ratio to the bare runs, by variant."""
    torch.set_num_threads(1)
    program = _program()
    campaign = Campaign(InjectTool(type="linear", seed=1), trials, top1_changed, progress=False)

    def run_bare() -> None:
        # A campaign runs the program twice more, without faults.
        for _ in range(trials + 2):
            program()

    def run_from_start() -> None:
        get_reusable_executor().shutdown(wait=True)
        campaign.run(program, jobs=2)

    variants: dict[str, Callable[[], object]] = {
        BARE: run_bare, AGAIN: run_bare, "1 job": lambda: campaign.run(program, jobs=1),
        "2 jobs": run_from_start, "2 jobs, workers started": lambda: campaign.run(program, jobs=2),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    program()
    for _ in range(rounds):
        for name, run in variants.items():
            begin = perf_counter()
            run()
            seconds[name].append(perf_counter() - begin)
    bare = statistics.median(seconds[BARE])
    return {
        name: {"seconds": statistics.median(values), "ratio": statistics.median(values) / bare}
        for name, values in seconds.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(benchmark(arguments.trials, arguments.rounds), indent=1))
