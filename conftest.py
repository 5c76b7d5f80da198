"""Every test draws the same random numbers, whichever ran before it in its process."""

import gc
import os
import random
import sys

import pytest

if len(getattr(os, "sched_getaffinity", lambda _: "all")(0)) == 1:
    # TensorFlow waits forever where a routine calls a function on the only thread; the driver says so.
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Take what earlier modules left out of later collections, which are many and would take seconds each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed what draws numbers; frameworks that no test has imported are left alone."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
