"""Print what three tasks cost with Amanda and with its peers: lines beside the bare program, and seconds.

    python benchmarks/tasks.py [TASK ...]

A task is a folder of tasks/: bare.py is the program, model.py what its programs share, and the others are the
program with a tool in it. Lines are those that a diff adds or changes. Seconds are of whole processes,
imports included, the median of five in turn; `amanda run` has no file, since it runs bare.py as it is.
"""

import argparse
import difflib
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from _measure import progress

HERE = Path(__file__).parent / "tasks"
COMMANDS = {"flops": "flops:by=module,depth=1", "nan": "nan"}
"""The specification of the tool that does a task from the command line; pruning ends in a changed program."""
ROUNDS = 5


def lines_added(program: Path) -> int:
    """Return how many lines a program adds to the bare one or changes beyond their indentation."""
    bare, full = (
        [line.strip() for line in path.read_text().splitlines() if line.strip()]
        for path in (program.with_name("bare.py"), program)
    )
    return sum(line.startswith("+ ") for line in difflib.ndiff(bare, full))


def seconds(command: list[str], answer: Path) -> float:
    """Return the wall time of a process, which writes its output into a file."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    start = time.perf_counter()
    with answer.open("w") as output:
        # An exception is how detect_anomaly answers.
        subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT, env=env)
    return time.perf_counter() - start


def measure(task: str) -> None:
    """Print the lines and seconds of each way to do a task, and keep their answers under build/tasks."""
    folder = HERE.parents[1] / "build" / "tasks" / task
    folder.mkdir(parents=True, exist_ok=True)
    bare = HERE / task / "bare.py"
    ways = {
        path.stem: ([sys.executable, str(path)], lines_added(path))
        for path in sorted((HERE / task).glob("*.py"))
        if path.stem != "model"
    }
    if task in COMMANDS:
        ways["amanda run"] = ([sys.executable, "-m", "amanda", "run", COMMANDS[task], str(bare)], 0)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(ROUNDS):
        progress(f"  {task}, round {number + 1} of {ROUNDS}")
        for way, (command, _) in ways.items():
            times[way].append(seconds(command, folder / f"{way}.txt"))
    base = median(times["bare"])
    print(f"| {task} | lines | seconds | over the bare program |\n|---|---|---|---|")
    for way, (_, lines) in ways.items():
        took = median(times[way])
        print(f"| {way} | {lines} | {took:.1f} | {took - base:+.1f} |")
    print()


def main() -> None:
    """Measure the tasks that the command line names, or all."""
    available = sorted(path.name for path in HERE.iterdir() if path.is_dir())
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(available)}")
    chosen = parser.parse_args().tasks
    if unknown := set(chosen) - set(available):
        parser.error(f"no task {', '.join(sorted(unknown))}; there are {', '.join(available)}")
    for task in chosen or available:
        measure(task)


if __name__ == "__main__":
    main()
