"""Operators of torch's own database, in a random order: bit-identical under tools, and seen as a whole.

What torch does not determine (sums by atomic additions, say) differs without a scope too; it is told apart.
"""

import random
from typing import Any

import torch
from _cases import Cases
from _measure import QUICK
from opdb._comparison import Count, not_seen
from opdb._variants import database
from opdb.test_operators import differing

SAMPLES = 4
ITSELF = "and without a scope"


def stage(cases: Cases) -> None:
    """Compare operators until the time is over."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    names = list(database())
    random.Random(0).shuffle(names)
    for name in names[: 3 if QUICK else None]:
        cases(name, compared, name)


def compared(name: str) -> dict[str, Any]:
    """Return how many calls of an operator were compared, and where they differ."""
    count = Count()
    found = differing(name, SAMPLES, count)
    unseen = [f"not seen: {one}" for one in not_seen(database()[name])]
    return {
        "calls": count.calls,
        "gradients": count.gradients,
        "undetermined": [one for one in found if ITSELF in one],
        "amiss": [one for one in found if ITSELF not in one] + unseen,
    }
