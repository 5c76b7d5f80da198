"""Runs the same programs again and again; prints how many blocks of memory live after each round."""

from __future__ import annotations

import gc
import sys

from . import programs
from .kinds import builtin_kinds


def main(rounds: int = 6, count: int = 40) -> None:
    """Any domain's blocks count, those that only C holds included."""
    builtin_kinds.watch_allocations()
    for _ in range(rounds):
        for number in range(count):
            programs.run(programs.bytes_of(number))
        gc.collect()
        sys.stdout.write(f"{builtin_kinds.live_blocks()}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
