"""Random programs of nested scopes do what a model says of them: what tools see, and which routines run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import pytest

import amanda
from amanda.testing import FakeDriver, attached, fake

OPS = ("relu", "relu", "ReluBackward", "ReluBackward")
INSERTIONS = ("insert_before_op", "insert_after_op", "insert_before_backward_op", "insert_after_backward_op")
LAST = len(INSERTIONS)


class Seen(NamedTuple):
    """Keys of its dependencies that a tool saw at a point, and the point where each was written last."""

    tool: Piece
    point: int
    written: dict[str, int]


class Piece(amanda.Tool):
    """Writes its key at some points, and runs a routine there; tools of one key stand for each other."""

    def __init__(
        self, key: str, points: Sequence[int], follows: bool, on: Sequence[Piece], log: list[object]
    ) -> None:
        super().__init__()
        self.key, self.points, self.on, self.follows_dependents, self.log = key, points, on, follows, log
        self.keys: set[str] = {piece.key for piece in on}.union(*(piece.keys for piece in on))
        self.depends_on(*on)
        for point in points:
            self.add_inst_for_op(partial(self.analyse, point), point > 1, point % 2 == 1)

    def stands_for(self) -> str:
        return self.key

    def analyse(self, point: int, context: amanda.OpContext) -> None:
        op = context.get_op() if point < 2 else context.get_backward_op()
        if op.__name__ == OPS[point]:
            self.log.append(Seen(self, point, {key: context[key] for key in self.keys & context.keys()}))
            context[self.key] = point
            getattr(context, INSERTIONS[point])(lambda *_: self.log.append((self, point)))


Layers = list[list[Piece]]


def pieces(chance: random.Random, log: list[object]) -> list[Piece]:
    """Return tools of which some follow, depend on others, or stand for each other."""
    groups: list[list[Piece]] = []
    for number in range(chance.randint(3, 5)):
        follows = chance.random() < 0.3
        points = range(LAST) if follows else sorted(chance.sample(range(LAST), chance.randint(0, LAST)))
        below = chance.sample(groups, min(number, chance.randint(0, 2)))
        alike = range(chance.choice([1, 1, 2]))
        groups.append(
            [Piece(f"key {number}", points, follows, [*map(chance.choice, below)], log) for _ in alike]
        )
    return [piece for alike in groups for piece in alike]


def layers(scopes: Sequence[Sequence[Piece]]) -> Layers:
    """Return the tools that join in each scope: dependencies first, none for which another stands already."""
    joined_by_scope: Layers = []
    for scope in scopes:
        joined: list[Piece] = []

        def visit(tool: Piece, joined: list[Piece] = joined) -> None:
            if tool.key not in {piece.key for piece in joined}:
                for dependency in tool.on:
                    visit(dependency)
                joined.append(tool)

        for tool in scope:
            visit(tool)
        open_already = {piece.key for layer in joined_by_scope for piece in layer}
        joined_by_scope.append([piece for piece in joined if piece.key not in open_already])
    return joined_by_scope


def taking_part(layers: Layers, point: int) -> list[tuple[int, Piece]]:
    """Return the layer and the tool of each routine of a point, in order.

    A tool that follows runs in the first layer in which a dependent does, or where it has none.
    """
    order: list[tuple[int, Piece]] = []
    for depth in range(len(layers)):
        applied = [tool for layer in layers[: depth + 1] for tool in layer]
        for tool in applied:
            above = [piece for piece in applied if tool.key in piece.keys and not piece.follows_dependents]
            awaits = tool.follows_dependents and above and not any(point in piece.points for piece in above)
            if point in tool.points and not awaits and tool not in [piece for _, piece in order]:
                order.append((depth, tool))
    return order


def written_for(layers: Layers, tool: Piece, point: int) -> dict[str, int] | None:
    """Return where the keys that a tool sees at a point were written last; None where it takes no part."""
    depth = next((depth for depth, piece in taking_part(layers, point) if piece is tool), None)
    if depth is None:
        return None
    before = [(at, *place) for at in range(point + 1) for place in taking_part(layers, at)]
    return {piece.key: at for at, within, piece in before if within <= depth and piece.key in tool.keys}


def ran(layers: Layers, point: int, opened: Layers | None = None) -> list[tuple[Piece, int]]:
    """Return the routines of a point that run where the tools of `opened` are open; of all tools if None."""
    keys = None if opened is None else {piece.key for layer in opened for piece in layer}
    return [(piece, point) for _, piece in taking_part(layers, point) if keys is None or piece.key in keys]


@contextmanager
def entered(scopes: Sequence[Sequence[Piece]], cached: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for tools in scopes:
            stack.enter_context(amanda.apply(*tools))
        if not cached:
            stack.enter_context(amanda.cache_disabled())
        yield


class Calling(fake.Module):
    """A module that calls a function, so that its ops are the same each time."""

    def __init__(self, forward: Callable[[fake.Tensor], fake.Tensor]) -> None:
        self.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(60))
def test_tools_of_nested_scopes_see_and_do_what_the_model_says(seed: int) -> None:
    chance, log = random.Random(seed), list[object]()
    tools = pieces(chance, log)
    nests = [
        [chance.sample(tools, chance.randint(1, min(3, len(tools)))) for _ in range(chance.randint(1, 3))]
        for _ in range(3)
    ]
    plain = Calling(lambda x: fake.relu(x))
    again = Calling(lambda x: fake.checkpoint(lambda value: fake.relu(value), x))
    for number in range(6):
        nest, later_nest = chance.choice(nests), chance.choice([None, chance.choice(nests)])
        cached, recomputes = chance.random() < 0.85, chance.random() < 0.4
        forward, backward = layers(nest), layers(nest if later_nest is None else later_nest)
        log.clear()
        with attached(FakeDriver), ExitStack() as scope:
            scope.enter_context(entered(nest, cached))
            y = (again if recomputes else plain)(fake.tensor([1.0], requires_grad=True))
            if later_nest is not None:
                scope.close()
                scope.enter_context(entered(later_nest, cached))
            log.append("backward")
            fake.sum(y).backward()
        whole = backward if recomputes else forward  # a checkpoint runs with the tools of the backward pass
        expected = [*ran(forward, 0), *ran(forward, 1), "backward"]
        expected += [*ran(whole, 0), *ran(whole, 1)] if recomputes else []
        expected += [*ran(whole, 2, backward), *ran(whole, 3, backward)]
        assert [event for event in log if not isinstance(event, Seen)] == expected, (seed, number)
        for tool, point, written in (event for event in log if isinstance(event, Seen)):
            possible = [written_for(layers_of_pass, tool, point) for layers_of_pass in (forward, whole)]
            assert written in possible, (seed, number, tool.key, point)


class Rewriting(amanda.Tool):
    """Writes, deletes and writes anew keys of the context of `relu` at two points, as a seed chooses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.add_inst_for_op(partial(self.rewrite, 0))
        self.add_inst_for_op(partial(self.rewrite, 1), require_outputs=True)

    def rewrite(self, point: int, context: amanda.OpContext) -> None:
        chance = random.Random(f"{self.seed} {point}")
        for _ in range(chance.randint(0, 6)):
            key = chance.choice("abcd")
            if chance.random() < 0.5:
                context[key] = chance.choice([None, 1, "one", 2.0])
            else:
                context.pop(key, None)


class Reading(amanda.Tool):
    """Lists the keys and values that it finds before and after `relu`."""

    def __init__(self, rewriting: Rewriting) -> None:
        super().__init__()
        self.found: list[dict[str, object]] = []
        self.depends_on(rewriting)
        for after in (False, True):
            self.add_inst_for_op(lambda context: self.found.append(dict(context)), require_outputs=after)


@pytest.mark.parametrize("seed", range(100))
def test_a_scope_within_sees_the_context_as_the_first_execution_left_it(seed: int) -> None:
    plain = Calling(lambda x: fake.relu(x))

    def run() -> None:
        plain(fake.tensor([1.0]))

    at_first, later = (Reading(Rewriting(seed)) for _ in range(2))
    with attached(FakeDriver):
        with amanda.apply(at_first):  # analysed together
            run()
        with amanda.apply(later._amanda.dependencies[0]):
            run()
            with amanda.apply(later):  # the plan of the scope around is from an earlier execution
                run()
    assert later.found == at_first.found
