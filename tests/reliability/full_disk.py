"""A disk that is full for a while, during a dump, a save, and `amanda run --every`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from unittest import mock

import children
import victim
from disk import full_disk
from frameworks import Framework, Outcome, Step, X, differs

from amanda.errors import AmandaError
from amanda.tools.dump import Dump, DumpTool
from amanda.tools.flops import FlopsTool
from amanda.tools.results import load


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Dump and save through full disks; steps go on, errors name the file, what was whole is still."""
    count, faults, end = 0, [], monotonic() + seconds
    with TemporaryDirectory() as folder:
        faults += _save_at_intervals(framework, Path(folder))
    while not count or monotonic() < end:
        with TemporaryDirectory() as folder:
            faults += [*_dump(framework, step, Path(folder)), *_save(framework, step, Path(folder))]
        count += 2
    return Outcome(count + 1, "full disks", len(faults), note="; ".join(sorted(set(faults))))


def _dump(framework: Framework, step: Step, folder: Path) -> list[str]:
    """Run twelve steps under a dump that writes files of a step, four of them on a full disk."""
    faults = []
    tool = DumpTool(folder / "dump", outputs="full", executions=None)
    try:
        with mock.patch("amanda.tools.dump._writer.SHARD", 400), framework.scope(tool):
            for number in range(12):
                with full_disk() if 4 <= number < 8 else contextlib.nullcontext():
                    if differs(step(X[0]), X[0]):
                        faults.append("another output on a full disk")
                    if number == 7 and not tool.result.failure:
                        faults.append("a dump that does not tell of the full disk")
        dump = Dump(folder / "dump")
        if not any(dump.array(entry) is not None for entry in dump):
            faults.append("a dump without tensors")
    except Exception as error:
        faults.append(f"dump: {type(error).__name__}: {error}")
    return faults


def _save(framework: Framework, step: Step, folder: Path) -> list[str]:
    """Save a result over another on a full disk."""
    tool, path = FlopsTool(), folder / "flops.json"
    with framework.scope(tool):
        step(X[0])
    tool.result.save(path)
    before = path.read_bytes()
    try:
        with full_disk():
            tool.result.save(path)
    except AmandaError as error:
        told = str(path) in str(error)
    except Exception:
        told = False
    return ["a file that is not as before"] * (path.read_bytes() != before) + ["an error without path"] * (
        not told
    )


def _save_at_intervals(framework: Framework, folder: Path) -> list[str]:
    """Save every fifth of a second through a full disk, until the process is killed."""
    program = [victim.__file__, framework.name, "--full-disk"]
    options = ["-q", "-t", "flops", "-o", str(folder), "--every", "0.2"]
    if "compiled" in framework.options:
        options += ["--compiled", framework.options["compiled"]]
    children.run([sys.executable, "-m", "amanda", "run", *options, "--", *program])
    saved = folder / "flops.json"
    if not saved.exists():
        return ["--every saved nothing"]
    calls = max(row["calls"] for row in json.loads(saved.read_text())["rows"])
    return [f"--every saved {calls} of {victim.STEPS} steps"] * (
        calls < 0.8 * victim.STEPS or not load(saved)
    )
