"""Wrong values for every option, through Python and through the command line."""

from __future__ import annotations

import os
from collections import Counter
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from frameworks import Framework, Outcome, Step
from public_options import PUBLIC, TOOLS, calls, text_calls

KINDS = {"was accepted": "accepted", "is a raw": "raw errors", "is not named": "not named", "took": "hangs"}
"""How a trouble begins, and what its kind is called."""


def attack(framework: Framework, step: Step, seconds: float) -> Outcome:
    """Give every option each wrong value, and those that the command line reads each text."""
    counts, begun = Counter[str](), Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # some values are names of files
        try:
            for _, trouble in chain(*map(calls, PUBLIC), *map(text_calls, TOOLS)):
                kind = next((kind for start, kind in KINDS.items() if trouble.startswith(start)), "right")
                counts[kind] += 1
        finally:
            os.chdir(begun)
    wrong = counts.total() - counts["right"]
    note = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS.values())
    return Outcome(counts.total(), "values", wrong, note=note)
