"""What `amanda run` hands to the program's processes, in the environment."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "AMANDA_TOOLS"
PROCESS = "AMANDA_PROCESS"
FOLDER = str(Path(__file__).parent / "launch")
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))


@dataclass(frozen=True)
class Handed:
    """tools: name and given options of each.  folder: where processes leave what the root gathers.

    root: id of the process that gathers and prints.  output: folder for results.  quiet: print nothing.
    frameworks: the import names at which the tools of a child begin.
    every: seconds after which results are saved as they are so far; None for not before the end.
    together: whether the program is one of several ranks, of which the last that ends gathers and prints.
    compiled: as of `amanda.apply`.  construction: whether tools see what makes models.
    """

    tools: list[tuple[str, dict[str, Any]]]
    folder: str
    root: int
    output: str | None
    quiet: bool
    frameworks: list[str]
    every: float | None = None
    together: bool = False
    compiled: str = "eager"
    construction: bool = False

    def put(self, environment: MutableMapping[str, str]) -> None:
        """Put it into an environment, with the folder on PYTHONPATH that Python begins with."""
        environment[VARIABLE] = json.dumps(asdict(self))
        paths = [
            path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != FOLDER
        ]
        environment["PYTHONPATH"] = os.pathsep.join([FOLDER, *paths])
        environment.pop(PROCESS, None)

    @classmethod
    def get(cls) -> Handed:
        """What the environment of this process has."""
        return cls(**json.loads(os.environ[VARIABLE]))


def number_of_ranks() -> int:
    """How many ranks the launcher has started on this host; 0 where it does not say, or others have more."""
    for every, here in _SIZES:
        size = os.environ.get(every, "")
        if size.isdigit() and os.environ.get(here) == size:
            return int(size)
    return 0


def process_label(handed: Handed) -> str:
    """A name for this process: "main", "rank0", "process123", "rank0.process123" for a child of a rank.

    "rank0.restart1" where the launcher has started the ranks again, "main.restart1" of a program that this
    process has become.
    """
    above = os.environ.get(PROCESS, "")
    rank = next((f"rank{os.environ[name]}" for name in _RANKS if os.environ.get(name, "").isdigit()), "")
    if rank and not above.startswith("rank"):
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        label = rank if restart == "0" else f"{rank}.restart{restart}"
    elif above and not (above.startswith("main") and os.getpid() == handed.root):
        label = f"{rank}.process{os.getpid()}".lstrip(".")
    else:
        label = "main"
    if not label.startswith("rank") and (Path(handed.folder) / f"{label}.json").exists():
        found = len(list(Path(handed.folder).glob(f"{label}.restart*.json")))
        label = f"{label}.restart{found + 1}"
    os.environ[PROCESS] = label
    return label
