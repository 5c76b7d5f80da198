"""Processes of one program: the settings that they inherit, their labels, and the last one to end.

Ranks that each began with `amanda run`, as under `torchrun -m amanda run`, share a folder; the last rank to
end prints the results of all.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from amanda.plugins import how_to_install
from amanda.tools.command._specs import Tooling, ToolSpec, make_tools

if sys.platform != "win32":
    import fcntl

# The settings as JSON; the label of the process that set it, which the processes that it starts inherit.
VARIABLE, PROCESS = "AMANDA_TOOLS", "AMANDA_PROCESS"
FOLDER = str(Path(__file__).parent / "launch")
# Variables that torchrun sets alike for all ranks of one start, and anew for a restart.
_VARIABLES_OF_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_SIZE_VARIABLES = (("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
                         ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"))  # fmt: skip
_RANK_LABEL = re.compile(r"rank(\d+)(\.restart\d+)?")


@dataclass(frozen=True)
class RunSettings:
    """Settings of `amanda run` that every process of the program inherits through its environment.

    tools: name and given options of each.  folder: where processes write their results for the root.
    root: id of the process that merges and prints results.  output: folder for results.
    quiet: print nothing.  view: what is printed of results, the fields of a `View`.
    frameworks: import names at which the scope of a child opens.
    every: seconds between two saves of the present results; None to save at the end alone.
    together: whether the program is one of several ranks, of which the last to end merges and prints.
    compiled: as in `amanda.apply`.  construction: whether tools see the ops that construct models.
    is_rank: whether the root is a rank.  no_op_texts: what is told where no process has executed an op;
    empty if that is expected.  tool_folders: where tools by import path may lie.
    """

    tools: list[tuple[str, dict[str, Any]]]
    folder: str
    root: int
    output: str | None
    frameworks: list[str]
    quiet: bool = False
    view: dict[str, Any] = field(default_factory=dict)
    every: float | None = None
    together: bool = False
    compiled: str = "eager"
    construction: bool = False
    is_rank: bool = False
    no_op_texts: list[str] = field(default_factory=list)
    tool_folders: list[str] = field(default_factory=list)

    def write_into(self, environment: MutableMapping[str, str]) -> None:
        """Write the settings into an environment, our sitecustomize first on PYTHONPATH; drop its label."""
        environment[VARIABLE] = json.dumps(asdict(self))
        paths = (path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path != FOLDER)
        # First, since Python imports one sitecustomize alone; ours then imports the program's.
        environment["PYTHONPATH"] = os.pathsep.join([FOLDER, *filter(None, paths)])
        # The label of the process that calls `amanda run`, where tools run it too.
        environment.pop(PROCESS, None)

    @classmethod
    def get(cls) -> RunSettings:
        """Return the settings in the environment of this process."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def toolings(self) -> list[Tooling]:
        """Return new tools for one process."""
        return make_tools((ToolSpec(*tool) for tool in self.tools), alone=True, folders=self.tool_folders)


def no_op_text(tool: str, frameworks: Sequence[str]) -> str:
    """Return the sentence for a run without an op of any framework."""
    if frameworks:
        return f"{tool}: no op of {' or '.join(frameworks)} was executed"
    return f"no driver is installed: {how_to_install()}"


def number_of_ranks() -> int:
    """Return the number of ranks if all of them are on this host; 0 on several hosts and outside of ranks."""
    for total_name, local_name in _WORLD_SIZE_VARIABLES:
        rank_count = os.environ.get(total_name, "")
        # On several hosts no rank sees the files of all others.
        if rank_count.isdigit() and os.environ.get(local_name) == rank_count:
            return int(rank_count)
    return 0


def is_in_rank() -> bool:
    """Return True in a rank and in the processes that it starts."""
    return any(os.environ.get(name, "").isdigit() for name in _RANK_VARIABLES)


def process_label(settings: RunSettings) -> str:
    """Return a label for this process, and set it in the environment, which its children inherit.

    "main", "rank0", "process123", "rank0.process123" for a rank's child; "rank0.restart1" after the launcher
    has started the ranks again, "main.restart1" after `exec` has replaced the program of the process.
    """
    inherited_label = os.environ.get(PROCESS, "")
    numbers = [os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()]
    rank = f"rank{numbers[0]}" if numbers else ""
    if rank and not inherited_label.startswith("rank"):  # the rank itself, and no child of it
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        label = rank if restart == "0" else f"{rank}.restart{restart}"
    # An inherited label is that of a parent, unless the root set it and replaced itself by `exec`, which
    # keeps its id.
    elif inherited_label and not (inherited_label.startswith("main") and os.getpid() == settings.root):
        label = f"{rank}.process{os.getpid()}".lstrip(".")
    else:
        label = "main"
    # A file of this label was written by the program that `exec` replaced.
    if not label.startswith("rank") and (Path(settings.folder) / f"{label}.json").exists():
        restarts = len(list(Path(settings.folder).glob(f"{label}.restart*.json")))
        label = f"{label}.restart{restarts + 1}"
    os.environ[PROCESS] = label
    return label


def is_rank(label: str) -> bool:
    """Return True for the label of a rank, False for that of a process that a rank has started."""
    return _RANK_LABEL.fullmatch(label) is not None


def missing_ranks(labels: Iterable[str], ranks: int | None = None) -> list[str]:
    """Return the labels of ranks that `labels` lacks, for each start of the ranks.

    ranks: the number of ranks; None for up to the highest one that has a label.
    """
    ranks_by_restart: dict[str, set[int]] = {}
    for match in filter(None, map(_RANK_LABEL.fullmatch, labels)):
        number, restart = int(match[1]), match[2] or ""
        ranks_by_restart.setdefault(restart, set()).add(number)
    if ranks and not ranks_by_restart:
        ranks_by_restart[""] = set()
    return [
        f"rank{rank}{restart}" for restart, present_ranks in ranks_by_restart.items()
        for rank in range(ranks or max(present_ranks) + 1) if rank not in present_ranks
    ]  # fmt: skip


def by_number(label: str) -> list[tuple[str, int]]:
    """Return a sort key that puts rank10 after rank2."""
    return [(letters, int(digits or 0)) for letters, digits in re.findall(r"(\D*)(\d*)", label)]


def folder_of_ranks() -> str | None:
    """Make or find the private folder that a launcher's ranks share; return its path, None without one."""
    # None outside of ranks, on several hosts, and where the folder may be another user's.
    if sys.platform == "win32" or number_of_ranks() < 2 or "RANK" not in os.environ:
        return None
    # Ranks of one launcher have one parent, and agree on the variables, so on the name too.
    run_text = "\0".join([str(os.getppid()), *(os.environ.get(name, "") for name in _VARIABLES_OF_RUN)])
    name = f"amanda-{os.getuid()}-{sha256(run_text.encode()).hexdigest()[:16]}"
    try:
        folder = Path(tempfile.gettempdir()) / name
        with suppress(FileExistsError):  # of another rank, or of somebody else
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:  # no temporary folder can be written to, or somebody has removed it
        return None
    # The name can be guessed: another user may have made the folder, or a link to one of ours.
    is_private = not status.st_mode & 0o077
    is_ours_alone = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and is_private
    return str(folder) if is_ours_alone else None


def is_python(path: Path) -> bool:
    """Return True for this Python interpreter, and for a script whose first line names Python."""
    if path.resolve() == Path(sys.executable).resolve():
        return True
    with path.open("rb") as file:
        first_line = file.readline(256)
    return first_line.startswith(b"#!") and b"python" in first_line


class Rank:
    """One of several ranks: removes its old results, and locks a file until the new ones are written."""

    def __init__(self, folder: str, label: str) -> None:
        self._folder = Path(folder)
        (self._folder / f"{label}.json").unlink(missing_ok=True)
        self._lock_file = (self._folder / f"{label}.alive").open("w")
        # The kernel releases the lock when the process dies, however it dies.
        fcntl.lockf(self._lock_file, fcntl.LOCK_EX)

    def end(self, write: Callable[[], object], report: Callable[[], None]) -> None:
        """Call `write` for the results of this rank, give up its lock, and `report` if no rank is alive."""
        with (self._folder / "reporting").open("w") as lock:
            # Under the lock, so that exactly one rank finds that it is the last.
            fcntl.lockf(lock, fcntl.LOCK_EX)
            write()
            self._lock_file.close()
            if not any(map(_is_alive, self._folder.glob("*.alive"))):
                report()


def _is_alive(path: Path) -> bool:
    """Return True while a process holds the lock of a file."""
    # Locks of lockf are for writing, for which the file has to be open for writing.
    with path.open("r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False
