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


# ---- passes whose form is known: counted without hooks ----

Step = Callable[[int], Any]


def counts_of(step: Step, also: bool, turns: int = 12) -> Counter[Any]:
    """Return what tallies count at backward ops in steps; also: beside routines, which hooks call."""
    tool = Counting("after_backward_op", also)
    with amanda.apply(tool):
        for turn in range(turns):
            step(turn)
    if also:
        assert tool.counted == tool.counter
    return tool.counted


def hooked_nodes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the hooks that are put at nodes from now on."""
    from amanda.drivers.torch import _autograd

    hooked: list[Any] = []
    remove = _autograd._BackwardPass.remove_hooks

    def removing(self: Any) -> None:
        hooked.extend(self._node_handles)
        remove(self)

    monkeypatch.setattr(_autograd._BackwardPass, "remove_hooks", removing)
    return hooked


class Either(torch.autograd.Function):
    """Gives a gradient or none, as its numbers say."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, has_gradient: bool) -> torch.Tensor:
        ctx.has_gradient = has_gradient
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad if ctx.has_gradient else None), None


layer = torch.nn.Linear(4, 4)
norm = torch.nn.LayerNorm(4)


def start() -> torch.Tensor:
    layer.zero_grad()
    return norm(layer(torch.rand(6, 4)).relu())  # type: ignore[no-any-return]


def all_alike(turn: int) -> None:
    start().sum().backward()  # type: ignore[no-untyped-call]


def sizes_that_change(turn: int) -> None:
    layer(torch.rand(2 + turn // 3 % 2, 4)).relu().sum().backward()


def one_part_or_the_other(turn: int) -> None:
    start().split(3)[turn // 3 % 2].sum().backward()


def one_output_or_the_other(turn: int) -> None:
    parts = start().split(3)
    parts[turn // 3 % 2].backward(torch.ones(3, 4))


def frozen_now_and_then(turn: int) -> None:
    layer.weight.requires_grad_(turn // 3 % 2 == 0)
    start().sum().backward()  # type: ignore[no-untyped-call]
    layer.weight.requires_grad_(True)


def numbers_decide(turn: int) -> None:
    Either.apply(start(), turn // 3 % 2 == 0).sum().backward()  # type: ignore[no-untyped-call]


def inputs_alone(turn: int) -> None:
    y = start().sum()
    if turn // 3 % 2:
        y.backward(inputs=[layer.bias])  # type: ignore[no-untyped-call]
    else:
        y.backward()  # type: ignore[no-untyped-call]


def twice_through_one_graph(turn: int) -> None:
    y = start().sum()
    y.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    y.backward()  # type: ignore[no-untyped-call]


def hook_takes_gradients_away(turn: int) -> None:
    y = start()
    assert y.grad_fn is not None
    if turn // 3 % 2:
        y.grad_fn.register_hook(lambda grads, _: tuple(None for _ in grads))
    y.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "step",
    [all_alike, sizes_that_change, one_part_or_the_other, one_output_or_the_other, frozen_now_and_then,
     numbers_decide, inputs_alone, twice_through_one_graph, hook_takes_gradients_away],
)  # fmt: skip
def test_passes_of_a_known_form_are_counted_as_hooks_count(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    from amanda.drivers.torch import _nodes

    monkeypatch.setattr(_nodes.NodeHooks, "of_program", False)
    assert counts_of(step, also=False) == counts_of(step, also=True)


@natively
def test_no_node_of_a_pass_of_a_known_form_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    from amanda.drivers.torch import _nodes

    monkeypatch.setattr(_nodes.NodeHooks, "of_program", False)
    hooked, tool = hooked_nodes(monkeypatch), Counting("after_backward_op", also=False)
    calls, numbers = list[int](), list[int]()
    with amanda.apply(tool):
        for _ in range(6):
            hooked.clear()
            before = tool.counted.total(), interceptor.statistics()["native"]
            all_alike(0)
            numbers.append(len(hooked))
            calls.append(interceptor.statistics()["native"] - before[1])
            assert tool.counted.total() - before[0] == 9
    assert numbers[2] > 0
    assert numbers[-1] == 0
    assert calls[2] == calls[-1]


@natively
def test_a_pass_of_a_known_form_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from amanda.drivers.torch import _nodes

    monkeypatch.setattr(_nodes.NodeHooks, "of_program", False)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("no gradient")

    def step(fails: bool = False) -> None:
        y = start()
        if fails:
            y.register_hook(fail)
        y.sum().backward()  # type: ignore[no-untyped-call]

    tool = Counting("after_backward_op", also=False)
    with amanda.apply(tool) as scope:
        for _ in range(4):
            step()
        counted = tool.counted
        with pytest.raises(ValueError, match="no gradient"):
            step(fails=True)
        assert tool.counted == counted
        assert "a backward pass that failed" in str(scope.report)
        step()
        assert tool.counted.total() > counted.total()
