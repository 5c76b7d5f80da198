"""Calls of torch's operator database under functions of torch.func are seen once, and stay what they are.

A sample runs with the slow tests, all of it by `nox -s opdb`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import amanda

from ._comparison import Count
from ._execution import Program, record
from ._records import ULPS, ULPS_NESTED, Facts, computed, difference
from ._tools import Everywhere, Watch, cloned, nothing, unchanged
from ._transforms import NESTED, RECORDED_OR_REPLACED, TRANSFORMS, Applied
from ._variants import Sample, Samples, Variant, database, dtypes, filled
from .exceptions import UNREACHABLE_STATISTICS

EVERY, EVERY_PAIRED = 90, 24
"""One op of so many is in the sample, and is tried under each pair of transforms."""
ELEMENTS, ELEMENTS_PAIRED = 40, 12
"""Elements of the tensors of a call at most, where the database has such a call.

A Hessian has their square, a Hessian of a Hessian their fourth power.
"""
ROUTINES: dict[str, Callable[..., Any]] = {"no-op": nothing, "echo": unchanged, "equal new values": cloned}
OF_MEMORY = ("Batching rule not implemented", "modified by an inplace operation")
"""What torch says of lazily negated views under vmap, and of saved tensors that were written.

A new value in the place of such a view is negated already, and nothing writes into that of a saved tensor.
"""
ALONE = [[name] for name in TRANSFORMS]
PAIRS = [list(pair) for pair in product(NESTED, repeat=2)]

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says of its prototypes and deprecations


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each op, where they are not deselected anyhow: the database imports half of torch."""
    for argument, every in {"name": 1, "paired": EVERY_PAIRED}.items():
        if argument in metafunc.fixturenames:
            is_selected = metafunc.config.getoption("markexpr") in ("", "opdb")
            metafunc.parametrize(argument, list(database())[::every] if is_selected else ["every op"])


def test_every_function_of_torch_func_is_tried() -> None:
    assert set(TRANSFORMS) == set(torch.func.__all__)


@pytest.mark.slow
def test_transformed_calls_of_the_sample_are_the_same_and_seen_once() -> None:
    count = Count()
    names = list(database())[::EVERY]
    assert {name: faults for name in names if (faults := list(amiss(name, ALONE, ELEMENTS, count)))} == {}
    assert count.calls > 80
    assert count.gradients > 30


@pytest.mark.opdb
def test_transformed_calls_are_the_same_and_seen_once(
    name: str, record_property: Callable[[str, int], None]
) -> None:
    count = Count()
    assert list(amiss(name, ALONE, ELEMENTS, count)) == []
    for name_of_count, n in vars(count).items():
        record_property(name_of_count, n)


@pytest.mark.opdb
def test_calls_under_pairs_of_transforms_are_the_same_and_seen_once(
    paired: str, record_property: Callable[[str, int], None]
) -> None:
    count = Count()
    assert list(amiss(paired, PAIRS, ELEMENTS_PAIRED, count)) == []
    for name_of_count, n in vars(count).items():
        record_property(name_of_count, n)


def amiss(name: str, nestings: list[list[str]], most: int, count: Count) -> Iterator[str]:
    """How the call of an op under transforms differs from the call without a scope, or is not seen once.

    most: elements of the call's tensors, if the database has a call of that size.
    """
    op = database()[name]
    sampled = Samples(op, dtypes(op)[0], 16)
    position = _of_suitable_size(list(sampled), most)
    if position is None:
        return
    for nesting in nestings:
        count.variants += 1
        call = TransformedCall(op, sampled, position, nesting)
        for fault in (*call.differences(count), *call.unseen()):
            yield f"{'('.join(nesting)}: {fault}"


def _of_suitable_size(samples: list[Sample], most: int) -> int | None:
    """The call with most elements that are not too many, or the smallest; None where none has elements."""
    sizes = {i: _elements(sample) for i, sample in enumerate(samples) if _elements(sample)}
    suitable = {i: size for i, size in sizes.items() if size <= most}
    return (
        max(suitable, key=sizes.__getitem__) if suitable else min(sizes, key=sizes.__getitem__, default=None)
    )


def _elements(sample: Sample) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(tuple(sample)) if isinstance(leaf, Tensor))


class TransformedCall:
    """One call of an op under nested transforms, which can be made again and again with equal arguments."""

    def __init__(self, op: Any, samples: Samples, position: int, transforms: list[str]) -> None:
        self._op, self._samples, self._position, self._transforms = op, samples, position, transforms
        self._program = Program()

    def record(self) -> Facts:
        """What the call and its gradient leave."""
        with amanda.disabled():
            sample = list(self._samples)[self._position]
        variant = Variant("", Applied(self._op.op, self._transforms))
        with filled() if "empty" in self._op.name else nullcontext():
            facts = record(self._program, variant, sample, "returned")
        assert facts is not None
        return facts

    def differences(self, count: Count) -> Iterator[str]:
        """How the call differs under tools, at the analysis and after it."""
        bare = self.record()
        count.add([bare])
        if difference(self.record(), bare):
            return  # torch does not determine it
        ulps = ULPS if len(self._transforms) < 2 else ULPS_NESTED
        for name, routine in ROUTINES.items():
            if routine is cloned and self._depends_on_memory(bare):
                continue
            with amanda.apply(Everywhere(routine)):
                records = [self.record() for _ in range(2)]
            differences = [
                difference(computed(facts, ulps), computed(bare, ulps))
                if routine is cloned
                else difference(facts, bare)
                for facts in records
            ]
            yield from (f"{name}: {fault}" for fault in dict.fromkeys(differences) if fault)

    def _depends_on_memory(self, bare: Facts) -> bool:
        """Return True if the call takes new values otherwise than the original ones, as torch itself does."""
        op, transform = UNREACHABLE_STATISTICS
        errors = f"{bare.get('error')} {bare.get('backward error')}"
        return any(text in errors for text in OF_MEMORY) or (
            self._op.name == op and transform in self._transforms
        )

    def unseen(self) -> Iterator[str]:
        """Which ops a tool sees under the transforms that it does not see without, or the reverse."""
        expected, seen = self._ops_seen([]), self._ops_seen(self._transforms)
        if expected is None or seen is None or RECORDED_OR_REPLACED & set(self._transforms):
            return
        if seen != expected:
            yield f"ops {seen} are seen instead of {expected}"

    def _ops_seen(self, transforms: list[str]) -> list[list[str]] | None:
        """Types of the ops that a tool sees in each call of the function; None for a call that fails."""
        with amanda.disabled():
            args, kwargs = list(self._samples)[self._position]
        watch = Watch()
        applied = Applied(self._op.op, transforms, watch)
        try:
            with amanda.apply(watch):
                applied(*args, **kwargs)
        except Exception:
            return None
        return applied.calls
