"""Graphs of backward ops: what executions leave there, on whichever interceptor is in force."""

import gc
import random
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import pytest

from amanda import interceptor
from amanda.interceptor import DeferredRelease, Graphs, Mark, _fallback

NATIVE = pytest.mark.skipif(not interceptor.NATIVE, reason="two interceptors are compared")


class Op:
    """A backward op with the op numbers that a clock gave."""

    def __init__(self, number: int, next: Iterable[Any] = ()) -> None:
        self.number = number
        self.notes: dict[str, Any] = {}
        self.next = tuple((node, 0) for node in next)

    def count(self) -> int:
        return self.number


class Leaf(Op):
    """Where a gradient is stored."""


class Tensor:
    """A tensor, the op that made it, and what it is a view of."""

    def __init__(self, maker: Op | None, base: "Tensor | None" = None) -> None:
        self.maker = maker
        self.base = base


def graphs(module: Any = interceptor, sample: Any = lambda op: None) -> Any:
    return module.Graphs(
        tensors=Tensor, leaf=Leaf, maker="maker", base="base", next="next", notes="notes", number="count",
        key="mark", sampled=sample,
    )  # fmt: skip


def test_an_op_is_marked_by_the_execution_that_made_it() -> None:
    inside, before, after = Op(5), Op(4), Op(7)
    mark = Mark("trace", 3, 5, 7)
    graphs().mark([Tensor(inside), (Tensor(before), Tensor(after)), Tensor(None), 3], mark)
    assert inside.notes == {"mark": mark}
    assert before.notes == after.notes == {}
    assert (mark.trace, mark.begin, mark.start, mark.end, mark.order) == ("trace", 3, 5, 7, 0)


def test_the_first_mark_of_an_op_stays() -> None:
    op, first = Op(1), Mark(None, 0, 0, 2)
    for mark in (first, Mark(None, 0, 0, 2)):
        graphs().mark(Tensor(op), mark)
    assert op.notes["mark"] is first


def test_the_base_of_a_view_is_marked_where_it_was_written() -> None:
    base = Tensor(Op(1))
    for bases in (False, True):
        graphs().mark(Tensor(Op(1), base), Mark(None, 0, 0, 2), bases)
        assert bool(base.maker and base.maker.notes) is bases


def test_ops_inside_another_one_and_leaves_come_from_its_execution() -> None:
    early, late = Leaf(0), Leaf(0)
    first = Op(1, [early, None])
    inner = Op(4, [first, late, early])
    outer = Op(5, [inner])
    marks = Mark("first", 1, 1, 2), Mark("second", 2, 4, 6)
    of = graphs()
    of.mark([Tensor(first)], marks[0])
    of.mark([Tensor(outer)], marks[1])
    marked = of.marked([outer, None])
    assert {op: (mark, number) for op, mark, number in marked} == {
        outer: (marks[1], 5), inner: (marks[1], 4), first: (marks[0], 1),
        late: (marks[1], 0), early: (marks[0], 0),
    }  # fmt: skip


def test_a_leaf_behind_an_op_of_a_routine_belongs_to_the_op() -> None:
    leaf = Leaf(0)
    of_a_routine = Op(1, [leaf])
    op = Op(3, [of_a_routine])
    mark = Mark("trace", 1, 3, 4)
    of = graphs()
    of.mark(Tensor(op), mark)
    assert of.marked([op]) == [(op, mark, 3), (leaf, mark, 0)]


def test_ops_of_no_known_execution_are_left_out() -> None:
    assert graphs().marked([Op(2, [Op(1, [Leaf(0)])])]) == []
    assert graphs().marked([]) == []


def test_some_of_the_ops_that_are_met_are_told() -> None:
    sampled: list[Op] = []
    chain = [Op(0)]
    for number in range(1, 2_000):
        chain.append(Op(number, [chain[-1]]))
    graphs(sample=sampled.append).marked([chain[-1]])
    assert 0 < len(sampled) < 400
    assert set(sampled) <= set(chain)


def test_marks_are_counted_while_they_are_there() -> None:
    gc.collect()
    before = Mark.alive()
    op = Op(1)
    graphs().mark(Tensor(op), Mark(None, 0, 0, 2))
    assert Mark.alive() == before + 1
    op.notes.clear()
    assert Mark.alive() == before


def test_graphs_keep_nothing_of_what_they_have_read() -> None:
    of, leaf = graphs(), Leaf(0)
    op = Op(1, [leaf])
    of.mark(Tensor(op), Mark(None, 0, 0, 2))
    assert len(of.marked([op])) == 2
    gone = weakref.ref(op), weakref.ref(leaf)
    del op, leaf
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class Failing(Op):
    """Fails in one of its attributes."""

    def __init__(self, where: str) -> None:
        super().__init__(1, [Op(0)])
        self.where = where

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("where"):
            raise LookupError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("where", ["next", "notes"])
def test_what_an_op_raises_is_the_exception(where: str) -> None:
    with pytest.raises(LookupError, match=where):
        graphs().marked([Op(3, [Failing(where)])])


def test_what_an_op_raises_when_it_is_marked_is_the_exception() -> None:
    for where in ("count", "notes"):
        with pytest.raises(LookupError, match=where):
            graphs().mark(Tensor(Failing(where)), Mark(None, 0, 0, 9))
    assert Mark.alive() >= 0


@NATIVE
def test_native_code_survives_what_is_no_graph() -> None:
    op = Op(1)
    wrong: list[Any] = ["next", [(None, 0)], None]
    for op.next in wrong:
        with pytest.raises(TypeError, match="pairs"):
            graphs().marked([op])
    empty: list[Any] = [(3,), ((),), ()]
    for op.next in empty:
        assert graphs().marked([op]) == []
    op.notes = 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match="no dict"):
        graphs().mark(Tensor(op), Mark(None, 0, 0, 9))


@NATIVE
def test_native_code_takes_only_what_it_knows() -> None:
    with pytest.raises(TypeError):
        Graphs(1, 2, 3)  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError):
        graphs().mark(Tensor(None), "mark")
    with pytest.raises(TypeError):
        graphs().marked(3)
    with pytest.raises(TypeError):
        Mark()  # type: ignore[call-arg]


@NATIVE
@pytest.mark.parametrize("seed", range(60))
def test_both_interceptors_find_the_same(seed: int) -> None:
    dice = random.Random(seed)
    ops: list[Op] = [Leaf(0) for _ in range(4)]
    makers: list[Op] = []
    for number in range(dice.randrange(2, 60)):
        ops.append(Op(number, dice.choices([*ops[-8:], None], k=dice.randrange(0, 4))))
        makers.append(ops[-1])
    marks = []
    for _ in range(dice.randrange(1, 12)):
        begin = dice.randrange(len(makers))
        start = begin + dice.randrange(3)
        marks.append((dice.choice(makers), begin, start, start + dice.randrange(5)))
    results = []
    for module in (interceptor, _fallback):
        for op in ops:
            op.notes = {}
        of = graphs(module)
        for maker, *numbers in marks:
            of.mark([Tensor(maker)], module.Mark(None, *numbers))
        marked = of.marked(ops[-3:])
        results.append(
            [(ops.index(op), mark.begin, mark.start, mark.end, number) for op, mark, number in marked]
        )
    assert results[0] == results[1]


def test_a_deep_graph_is_read_without_recursion() -> None:
    op = Op(0)
    chain = [op]
    for number in range(1, 3 * sys.getrecursionlimit()):
        op = Op(number, [op])
        chain.append(op)
    of = graphs()
    of.mark(Tensor(op), Mark("trace", 0, 0, len(chain)))
    assert len(of.marked([op])) == len(chain)
    while chain:
        chain.pop(0).next = ()


@pytest.mark.parametrize("module", [interceptor, _fallback])
def test_all_ops_behind_some_are_listed_once_also_without_marks(module: Any) -> None:
    leaf = Leaf(0)
    inner = Op(1, [leaf, leaf])
    first, second = Op(2, [inner, None]), Op(3, [leaf, inner])
    assert graphs(module).behind([first, None, second, first]) == [first, second, inner, leaf]


def test_a_graph_with_a_class_of_python_has_no_form() -> None:
    # Nothing is known of what a program's own function gives.
    assert graphs().form([]) == graphs().form([Op(1, [Leaf(0)])]) == 0
    assert graphs(_fallback).form([Op(1)]) == 0


class Freed:
    """Adds its name to a list when it is freed."""

    def __init__(self, name: str, freed: list[str]) -> None:
        self.name = name
        self.freed = freed

    def __del__(self) -> None:
        self.freed.append(self.name)


@pytest.mark.parametrize("kind", [DeferredRelease, _fallback.DeferredRelease])
def test_a_release_within_another_comes_after_it(kind: Any) -> None:
    freed: list[str] = []
    # A tuple frees its last item first.
    inner = kind((Freed("third", freed), kind(Freed("fourth", freed))))
    release = kind((Freed("second", freed), inner, Freed("first", freed)))
    del inner
    assert freed == []
    del release
    assert freed == ["first", "second", "third", "fourth"]
    kind(Freed("later", freed))
    assert freed[4:] == ["later"]


@pytest.mark.parametrize("kind", [DeferredRelease, _fallback.DeferredRelease])
def test_chains_of_releases_are_freed_without_recursion(kind: Any) -> None:
    freed: list[str] = []
    chain: Any = Freed("last", freed)
    for _ in range(200_000):
        chain = kind(chain)
    del chain
    assert freed == ["last"]


def test_what_an_interrupt_left_unmade_is_freed_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    marks = _fallback.Mark.alive()
    for kind in (_fallback.DeferredRelease, _fallback.Mark):
        kind.__new__(kind)  # the handler of a signal may raise before `__init__` has stored anything
    assert errors == []
    assert _fallback.Mark.alive() == marks
