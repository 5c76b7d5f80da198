"""The schedule of a rewritten graph: as few sessions as routines between them allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto

from ._control_flow import Flow
from ._names import reads
from ._places import Call, Compute, Item

BUDGET = 256 << 20
"""Bytes of values that one session keeps for observers."""


@dataclass
class Step:
    """Routines and control flow, and the nodes of the session that runs after them.

    inputs: values that the session is given.  outputs: that it gives.  constants: that it holds.
    done: values that nothing reads after this step.
    """

    calls: list[Call | Flow] = field(default_factory=list)
    nodes: list[NodeProto] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


def schedule(
    items: Iterable[Item],
    constants: Collection[str],
    fetched: Collection[str],
    nbytes: Callable[[str], int] = lambda name: 0,
    budget: int = BUDGET,
) -> list[Step]:
    """The steps in which items run.

    A node runs in the first session in which its inputs are there; a routine before the first session by
    when they are.  So a session ends where a value that a routine changes is read, and observers share one,
    up to a budget.  constants: values that every session may hold.  fetched: what the graph gives.
    nbytes: the size of a value.
    """
    steps: defaultdict[int, Step] = defaultdict(Step)
    in_session: dict[str, int] = {}  # the first session in which a value can be read
    in_python: dict[str, int] = {}  # the first step at which routines can
    seen: defaultdict[int, int] = defaultdict(int)
    least = 0
    for item in items:
        if isinstance(item, Compute):
            at = max((in_session.get(name, 0) for name in reads(item.node)), default=0)
            at = max(at, least)
            steps[at].nodes.append(item.node)
            in_session.update(dict.fromkeys(item.node.output, at))
            in_python.update(dict.fromkeys(item.node.output, at + 1))
            continue
        assert isinstance(item, (Call, Flow))
        at = max((in_python.get(name, 0) for name in (*item.reads, *item.waits)), default=0)
        steps[at].calls.append(item)
        in_session.update(dict.fromkeys(item.gives, at))
        in_python.update(dict.fromkeys(item.gives, at))
        seen[at] += 0 if item.gives else sum(nbytes(name) for name in item.reads)
        if seen[at] > budget:
            least = max(least, at)
    ordered = [steps[at] for at in sorted(steps)]
    _connect(ordered, constants, fetched)
    return ordered


def _connect(steps: Sequence[Step], constants: Collection[str], fetched: Collection[str]) -> None:
    """Find what passes between the steps."""
    wanted = set(fetched)
    for step in reversed(steps):
        made = {name for node in step.nodes for name in node.output}
        read = dict.fromkeys(name for node in step.nodes for name in reads(node) if name not in made)
        step.outputs = [name for name in dict.fromkeys(_outputs(step.nodes)) if name in wanted]
        step.constants = [name for name in read if name in constants]
        step.inputs = [name for name in read if name not in constants]
        needed = {*step.inputs, *(name for call in step.calls for name in call.reads)}
        step.done = sorted(needed - wanted)
        wanted |= needed


def _outputs(nodes: Iterable[NodeProto]) -> Iterable[str]:
    return (name for node in nodes for name in node.output if name)
