"""Waits of nodes for others where no value leads from one to the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ._nodes import INT64, either, new_node, passed

if TYPE_CHECKING:
    from ._body import Body


class Waits:
    """The nodes of one body that others may wait for.

    made: gets the nodes that are needed besides.
    numbers: by the names of nodes the number that they read, which tells the loop that they are in.
    in_flow: names of operations behind control flow of version 1, which may leave them out.
    """

    def __init__(self, body: Body, made: list[Any]) -> None:
        self.numbers: dict[str, str] = {}
        self.in_flow: Collection[str] = ()
        self._body = body
        self._made = made
        self._unsure: set[str] = set()
        self._either: dict[tuple[str, ...], str] = {}
        self._numbers = 0

    def note(self, node: str, name: str, number: str) -> None:
        """Make others wait for a node that reads the number, and runs where one of that name does."""
        self.numbers[node] = number
        if name in self.in_flow:
            self._unsure.add(node)

    def after(self, nodes: Iterable[str], number: str) -> list[str]:
        """Control inputs of a node that reads the number, so that it comes after others.

        A loop of gradients waits as a whole for the loop that it belongs to: its nodes need not.
        """
        frames = self._body.frames
        if frames is None:
            return [f"^{one}" for one in nodes]
        nodes = list(nodes)
        here = [one for one in nodes if self.numbers[one] == number]
        waits: list[str | None] = [one for one in here if one not in self._unsure]
        unsure = tuple(one for one in here if one in self._unsure)
        if unsure:
            waits.append(self._run_or_left_out(unsure, number))
        waits += [frames.end_of(self.numbers[one], number) for one in nodes if one not in here]
        return [f"^{one}" for one in waits if one is not None]

    def number_after(self, number: str, rank: int, waits: Sequence[str]) -> str:
        """The number for a call that waits for others: how it is read.

        rank: 0 for a number alone, 1 where rounds follow it.
        Where a call waits for another, and reads what waits for that as well, TensorFlow's optimizer drops
        the wait of the call, and then lets each node of the function run once it has what it reads itself.
        """
        self._numbers += 1
        name = f"amanda/after{self._numbers}"
        self._made.append(passed(name, [number, *waits], INT64, rank))
        return name if self._body.syntax.dead_values else f"{name}:output:0"

    def _run_or_left_out(self, nodes: tuple[str, ...], number: str) -> str:
        """A node that runs when each of these has run or been left out.

        TensorFlow's optimizer drops a wait for what another wait comes after. Where the former is left out,
        a node would run all the same behind a ControlTrigger; past a Merge the optimizer does not look.
        """
        if nodes not in self._either:
            name = f"amanda/either{len(self._either)}"
            read = new_node(f"{name}/number", "Identity", [number, f"^{name}"], T=INT64)
            merge = new_node(f"{name}/merge", "Merge", [read.name], 1, T=INT64)
            self._made += [either(name, nodes), read, merge]
            self._either[nodes] = merge.name
        return self._either[nodes]
