"""Tallies: executions by the shapes of their values."""

import gc
import random
from collections import Counter
from typing import Any

import pytest

import amanda
from amanda import interceptor
from amanda.action import has_parameter, marks
from amanda.interceptor import _fallback
from amanda.plan.observers import ShapeTally
from amanda.plan.tensors import BatchedShape

KINDS = pytest.mark.parametrize("kind", [interceptor.ShapeCounter, _fallback.ShapeCounter])
HUGE = 2**63


class Extent(int):
    """An extent that is no int."""


def shapes(chance: random.Random) -> Any:
    """Return shapes of an execution: of tensors, of lists of tensors, and of what has none."""

    def shape() -> tuple[int, ...]:
        return tuple(chance.choice([0, 1, 3, 2**62]) for _ in range(chance.randrange(4)))

    def value() -> Any:
        kind = chance.randrange(6)
        if kind == 0:
            return None
        if kind == 1:
            return tuple(shape() for _ in range(chance.randrange(3)))
        return shape()

    return tuple(tuple(value() for _ in range(chance.randrange(4))) for _ in range(chance.randrange(4)))


@KINDS
def test_it_counts_as_a_counter_does(kind: Any) -> None:
    chance, tally, counter = random.Random(0), kind(), Counter[Any]()
    for _ in range(20_000):
        key = shapes(chance)
        tally.add(key)
        counter[key] += 1
        if chance.randrange(9) == 0:
            tally.add(key)
            counter[key] += 1
    assert len(tally) == len(counter) > 2000
    assert tally.items() == list(counter.items())


@KINDS
@pytest.mark.parametrize(
    "odd",
    [
        ((tuple(range(200)),),), (((HUGE,),),), (((Extent(3),),),), ("abc",), (((1, "n"),),), (((1,), 2),),
        ((((None,),),),), 7,
    ],
    ids=repr,
)  # fmt: skip
def test_shapes_of_no_usual_form_are_counted_too(kind: Any, odd: Any) -> None:
    tally = kind()
    for key in (odd, (((1,),),), odd):
        tally.add(key)
    assert Counter(dict(tally.items())) == {(((1,),),): 1, odd: 2}
    assert len(tally) == 2


@KINDS
def test_shapes_that_cannot_be_told_apart_raise(kind: Any) -> None:
    tally = kind()
    with pytest.raises(TypeError):
        tally.add([[1]])
    assert len(tally) == 0


@KINDS
def test_it_forgets_and_counts_on(kind: Any) -> None:
    tally = kind(2)
    for _ in range(2):
        for i in range(5):
            tally.add((((i,),),))
        assert [calls for _, calls in tally.items()] == [1] * 5
        tally.clear()
        assert (len(tally), tally.items()) == (0, [])


@KINDS
def test_a_subclass_takes_what_it_likes(kind: Any) -> None:
    class Named(kind):  # type: ignore[misc]
        def __init__(self, name: str, **more: Any) -> None:
            super().__init__(3)
            self.name = name

    named = Named("a", b=1)
    named.add(())
    assert (named.name, named.items()) == ("a", [((), 1)])


def test_what_counts_oddly_is_freed() -> None:
    class Odd(tuple):  # type: ignore[type-arg]
        __slots__ = ()

    tally = amanda.ShapeTally()
    tally(shapes=Odd([tally]))
    del tally
    assert gc.collect() > 0


def test_the_observers_tell_what_they_take() -> None:
    assert marks(amanda.Tally()) == marks(amanda.ShapeTally()) == {"observer"}
    assert has_parameter(amanda.ShapeTally(), "shapes", keyword_only=True)
    assert not has_parameter(amanda.Tally(), "shapes")
    assert not has_parameter(amanda.ShapeTally(), "run")


def test_samples_are_those_of_all_batches_of_a_vmap() -> None:
    in_vmaps = BatchedShape((2, 3), [(1, 4), (2, 5)])
    assert ShapeTally.samples((((2, 3),), ((2, 4),))) == 1
    assert ShapeTally.samples((((2, 3), [in_vmaps]), ((2, 4),))) == 20
