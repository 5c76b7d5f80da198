"""Damaged files of each kind that tools write: flipped bytes, overwritten stretches, missing ends."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from frameworks import Framework, Outcome, Step
from tool_files import READERS, save_each, tools_after_a_run
from torch import nn

from amanda.errors import AmandaError


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Read damaged files, kind by kind: each is read, or an error of Amanda's that names the file."""
    tools = tools_after_a_run(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)))
    chance, end = random.Random(0), monotonic() + seconds
    count, read, faults = 0, 0, set()
    with TemporaryDirectory() as saved, TemporaryDirectory() as damaged:
        save_each(tools, Path(saved))
        kinds = [name for name in READERS if Path(saved, name).exists()]
        for name in itertools.cycle(kinds):
            if count >= len(kinds) and monotonic() > end:
                break
            count += 1
            shutil.copytree(saved, damaged, dirs_exist_ok=True)
            path = Path(damaged, name)
            path.write_bytes(damage(path.read_bytes(), chance))
            try:
                READERS[name](tools, path)
                read += 1
            except AmandaError as error:
                if path.name not in str(error):
                    faults.add(f"{name}: {error}")
            except Exception as error:
                faults.add(f"{name}: {type(error).__name__}: {error}")
    note = f"{len(kinds)} kinds; {read:,} were read, where the damage is in a value"
    return Outcome(count, "files", len(faults), note="; ".join([note, *sorted(faults)]))


def damage(content: bytes, chance: random.Random) -> bytes:
    """Return a file's content with up to eight bits flipped, or noise in its midst, or without its end."""
    changed, place = bytearray(content), chance.randrange(len(content))
    match chance.randrange(4):
        case 0:
            return content[:place]
        case 1:
            changed[place : place + 20] = chance.randbytes(20)
        case _:
            for _ in range(chance.randint(1, 8)):
                changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(changed)
