"""Native code counts executions by their shapes as a routine in Python that is given them would."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amanda
from amanda import OpContext, interceptor

natively = pytest.mark.xfail(not interceptor.NATIVE, reason="never: Python counts for itself", run=False)


class Spied(amanda.ShapeTally):
    """Notes calls of itself, of which native code makes none."""

    def __init__(self, limit: int = 1024) -> None:
        super().__init__(limit)
        self.calls = 0

    def __call__(self, *, shapes: tuple[Any, ...]) -> None:
        self.calls += 1
        super().__call__(shapes=shapes)


class Counting(amanda.Tool):
    """Counts all ops at one of the four points, twice: by a tally, and by a routine."""

    def __init__(self, point: str, also: bool = True, limit: int = 1024) -> None:
        super().__init__()
        self.insert, self.also, self.limit = f"insert_{point}", also, limit
        self.tallies = list[Spied]()
        self.counter = Counter[Any]()
        self.add_inst_for_op(self.look, backward="backward" in point)

    def look(self, context: OpContext) -> None:
        self.tallies.append(Spied(self.limit))
        insert = getattr(context, self.insert)
        insert(self.tallies[-1], [])
        if self.also:
            insert(self.count, [])

    def count(self, *, shapes: Any) -> None:
        self.counter[shapes] += 1

    @property
    def counted(self) -> Counter[Any]:
        counts = Counter[Any]()
        for tally in self.tallies:
            counts.update(dict(tally.items()))
        return counts


w = torch.rand(4, 4, requires_grad=True)


def ops(size: int) -> None:
    x = torch.rand(size, 4)
    y = torch.nn.functional.linear(x, w)
    parts = torch.split(y, 2)
    z = torch.cat(parts) + torch.stack([y, y])[0]
    many = torch.cat([x[:, :1] for _ in range(70)], dim=1)
    resized = torch.rand(size, 4)
    resized.t_()
    resized.resize_(2, 2)
    torch.einsum("ij,kj->ik", y, w)
    torch.meshgrid(torch.arange(size), torch.arange(2), indexing="ij")
    torch.tensor(float(size)).relu()
    torch.zeros(2, size).to_sparse().sum()
    torch.zeros(size, 2).to_sparse().coalesce().values()
    (z.max(dim=0).values.sum() + many.sum()).backward()  # type: ignore[no-untyped-call]


def run(tool: Counting, program: Callable[[int], None]) -> None:
    with amanda.apply(tool):
        for size in (3, 5, 3, 3, 6, 7, 7, 8, 5):
            program(size)


@pytest.mark.parametrize("point", ["before_op", "after_op", "before_backward_op", "after_backward_op"])
def test_it_counts_what_a_routine_is_told(point: str) -> None:
    tool = Counting(point)
    run(tool, ops)
    assert tool.counted == tool.counter
    assert tool.counter.total() > 9 * 4
    alone = Counting(point, also=False)
    run(alone, ops)
    assert alone.counted == tool.counter


@natively
@pytest.mark.parametrize("point", ["before_op", "after_op", "after_backward_op"])
def test_no_python_is_called_but_for_first_executions_and_beyond_the_limit(point: str) -> None:
    def relu(size: int) -> None:
        torch.nn.functional.linear(torch.rand(size, 4), w).relu().sum().backward()  # type: ignore[no-untyped-call]

    tool = Counting(point, also=False)
    run(tool, relu)
    called = sum(tally.calls for tally in tool.tallies)
    assert called <= 3 * len(tool.tallies)
    run(tool, relu)
    assert sum(tally.calls for tally in tool.tallies) == called
    few = Counting(point, also=False, limit=2)
    run(few, relu)
    run(few, relu)
    assert few.counted == tool.counted
    assert sum(tally.calls for tally in few.tallies) > called


def test_a_tally_counts_whatever_the_shapes_are() -> None:
    tally = amanda.Tally()
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(tally, []))
    with amanda.apply(tool):
        for i in range(5):
            torch.rand(i).relu().neg()
    assert tally.calls == 15


def test_values_that_routines_give_and_what_replaces_an_op_are_counted() -> None:
    class Giving(Counting):
        def look(self, context: OpContext) -> None:
            if context.get_op().__name__ == "relu":
                context.insert_before_op(lambda x: x + 1)
                context.replace_op(lambda x: x[:1])
            super().look(context)

    tool = Giving("after_op")
    x = torch.rand(3, 4)
    with amanda.apply(tool):
        for _ in range(4):
            x.relu()
    assert tool.counted == tool.counter == {(((3, 4),), ((1, 4),)): 4}
