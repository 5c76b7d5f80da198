"""Models of timm and transformers: outputs, gradients and random states are the same bits under tools."""

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from _cases import Cases, bare
from _measure import QUICK
from copies import copied
from zoo import timm_models, transformers_models
from zoo.observation import apart, computed, differences, observed
from zoo.subject import Subject

import amanda
from amanda.testing import EqualCopies, Silent, Unchanged

EACH = 1 if QUICK else 15
"""Models of each package."""


def stage(cases: Cases) -> None:
    """Train each model, bare and under three tools."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    for subject in subjects():
        cases(subject.name, trained, subject)


def subjects() -> Iterator[Subject]:
    """Yield models of both packages in turns: those that are tested by default, then others evenly."""
    timm = importlib.import_module("timm")
    known = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    chosen = []
    for zoo, here in ((timm_models, timm.is_model), (transformers_models, known.__contains__)):
        every = [one for one in zoo.subjects() if here(one.name)]
        first = [one for one in every if one.name in zoo.SAMPLE]
        others = [one for one in every if one.name not in zoo.SAMPLE]
        chosen.append((first + others[:: len(others) // EACH or 1])[:EACH])
    yield from itertools.chain.from_iterable(zip(*chosen, strict=False))


def trained(subject: Subject) -> dict[str, Any]:
    """Return where a model differs under tools; what differs without a tool too is told apart."""
    torch.manual_seed(0)
    model, inputs = bare(subject.make)
    steps = subject.settles + 1
    alone = bare(lambda: observed(model, inputs, steps=steps))
    again = set(differences(alone, observed(model, inputs, steps=steps)))
    amiss, undetermined = [], [f"without a tool: {name}" for name in again]
    for tool in (Silent(), Unchanged()):
        found = differences(alone, observed(model, inputs, lambda tool=tool: amanda.apply(tool), steps=steps))
        amiss += [f"{type(tool).__name__}: {name}" for name in found if name not in again]
    fresh = EqualCopies(copied)
    under = computed(model, inputs, lambda: amanda.apply(fresh))
    differs = apart(under, computed(model, inputs))
    unsteady = set(apart(computed(model, inputs), computed(model, inputs))) if differs else set()
    amiss += [f"Fresh: {name}" for name in differs if name not in unsteady]
    return {"calls": fresh.calls, "undetermined": undetermined + sorted(unsteady), "amiss": amiss}
