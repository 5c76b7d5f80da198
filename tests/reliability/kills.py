"""Processes that are killed while they dump and save."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import children
from frameworks import Framework, Outcome, Step, X

from amanda.errors import AmandaError
from amanda.files import is_part
from amanda.tools.dump import Dump, DumpTool
from amanda.tools.results import load

VICTIM = str(Path(__file__).with_name("victim.py"))
LEAST, LONGEST = 2, 1.5


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Kill programs at random moments after their first save; read what is there, and dump over it."""
    instants, end = random.Random(0), monotonic() + seconds
    kills, wrong, parts, errors = 0, 0, 0, set()
    while kills < LEAST or monotonic() < end:
        with TemporaryDirectory() as folder:
            _kill(framework, folder, instants.uniform(0, LONGEST))
            kills += 1
            parts += sum(is_part(path.name) for path in Path(folder).rglob("*"))
            try:
                _read(Path(folder), framework, step)
            except (AmandaError, AssertionError) as error:
                wrong += 1
                errors.add(str(error))
    note = f"{parts} parts of files left, which the next dump removes"
    return Outcome(kills, "kills", wrong, note="; ".join([note, *sorted(errors)[:1]]))


def _kill(framework: Framework, folder: str, instant: float) -> None:
    command = [sys.executable, VICTIM, framework.name, folder]
    with children.started(
        command, stdout=children.subprocess.PIPE, stderr=children.subprocess.DEVNULL
    ) as child:
        assert child.stdout is not None
        while child.stdout.readline() not in ("saved\n", ""):
            pass
        sleep(instant)


def _read(folder: Path, framework: Framework, step: Step) -> None:
    """Read the result and every tensor of the dump; replace the dump."""
    assert load(folder / "flops.json").rows(), "flops.json is empty"
    dump = Dump(folder / "dump")
    arrays = [dump.array(entry) for entry in dump]
    assert any(array is not None for array in arrays), "the dump has no tensor"
    tool = DumpTool(folder / "dump", outputs="full", overwrite=True)
    with framework.scope(tool):
        step(X[0])
    assert not tool.result.failure, tool.result.failure
