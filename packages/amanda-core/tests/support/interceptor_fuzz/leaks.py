"""Runs the same programs again and again: the blocks of memory that live after a round stay about as many.

`python -m interceptor_fuzz.leaks ROUNDS PROGRAMS MOST`; a block leaked at every call is hundreds a round.
"""

from __future__ import annotations

import gc
import sys

from . import programs
from .kinds import builtin_kinds


def main(rounds: int = 12, count: int = 40, most: float = 150) -> None:
    """Any domain's blocks count, those that only C holds included; free lists fill in the first rounds."""
    builtin_kinds.watch_allocations()
    blocks = []
    for _ in range(rounds):
        for number in range(count):
            programs.run(programs.bytes_of(number))
        gc.collect()
        blocks.append(builtin_kinds.live_blocks())
    growth = (blocks[-1] - blocks[rounds // 2]) / (rounds - rounds // 2)
    assert growth < most, blocks
    sys.stdout.write(f"{growth:.0f} blocks a round\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
