"""Programs whose bytes a fuzzer chooses by what they reach; needs atheris.

`python -m interceptor_fuzz.guided -max_total_time=60 CORPUS`; what it finds is replayed with `FILE` for CORPUS.
"""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["interceptor_fuzz", "amanda._opid"]):
    from . import programs


def one_input(data: bytes) -> None:
    """Run the program; a Difference or a crash is a find."""
    programs.run(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
