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
    frameworks: list[str]
    quiet: bool = False
    every: float | None = None
    together: bool = False
    compiled: str = "eager"
    construction: bool = False

    def put(self, environment: MutableMapping[str, str]) -> None:
        """Put it into an environment, with the folder on PYTHONPATH that Python begins with."""
        environment[VARIABLE] = json.dumps(asdict(self))
        others = (path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path != FOLDER)
        environment["PYTHONPATH"] = os.pathsep.join([FOLDER, *filter(None, others)])
        environment.pop(PROCESS, None)

    @classmethod
    def get(cls) -> Handed:
        """Read the environment of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))
