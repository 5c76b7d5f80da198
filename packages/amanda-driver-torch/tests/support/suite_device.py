"""The device that the conformance suite, the operators and the zoo run on: a GPU in `nox -s gpu`."""

import os

import torch

DEVICE = os.environ.get("AMANDA_TEST_DEVICE", "cpu")


def seed_device(seed: int) -> None:
    """Seed the generators that ops on the device draw from; `torch.manual_seed` takes a millisecond."""
    torch.default_generator.manual_seed(seed)
    if DEVICE == "cuda":
        torch.cuda.manual_seed(seed)


def random_state() -> bytes:
    """Return the state of these generators."""
    state = bytes(torch.get_rng_state().numpy().tobytes())
    return state + bytes(torch.cuda.get_rng_state().numpy().tobytes()) if DEVICE == "cuda" else state
