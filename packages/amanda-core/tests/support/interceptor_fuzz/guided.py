"""Programs whose bytes a fuzzer chooses by what they reach; needs atheris.

`python -m interceptor_fuzz.guided -max_total_time=60 CORPUS`; a file for CORPUS
replays what it found.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["interceptor_fuzz", "amanda.interceptor.opid"]):
    from . import programs


def one_input(data: bytes) -> None:
    """Run the program; a Difference or a crash is a find."""
    programs.run(data)


def sow(folder: Path) -> None:
    """Programs to begin with, in an empty folder."""
    if not any(folder.iterdir()):
        for number in range(60):
            (folder / str(number)).write_bytes(programs.bytes_of(number))


if __name__ == "__main__":
    for given in map(Path, sys.argv[1:]):
        if given.is_dir():
            sow(given)
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
