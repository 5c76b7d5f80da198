"""An exported graph of PyTorch, cut by a plan: the stage of each node, and what goes from stage to stage.

`torch.distributed.pipelining` sends a value to one other stage, which must not write to it, and only as
dense memory. So a value goes from stage to stage until its last reader has it, and an op that writes to a
value of an earlier stage writes to a copy.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from math import inf
from typing import Any

from amanda.tools.partition._cut import PartitionError
from amanda.tools.partition._plan import Plan
from amanda.tools.partition._pytorch_frames import name_frames
from amanda.tools.partition._pytorch_nodes import (
    check_blocks,
    is_assignment,
    module_of,
    name_as_in_stages,
    remove_copies_onto_themselves,
    roots,
    type_of,
    written,
)


class CutGraph:
    """Cuts the graph of an exported program; an object is a split policy of PyTorch's `pipeline`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._place: dict[Any, tuple[int, float]] = {}
        self._in_buffers: set[Any] = set()

    def __call__(self, module: Any) -> Any:
        """Order the nodes of a graph module by their stages, with a mark between two stages.

        Raises PartitionError for a graph that the plan is not of, and for values that cannot cross.
        """
        from torch.distributed.pipelining._IR import aten_pipe_split_alias

        self._graph = module.graph
        check_blocks(module)
        remove_copies_onto_themselves(self._graph)
        for node in self._graph.find_nodes(op="get_attr"):
            if not node.users:
                self._graph.erase_node(node)
        name_as_in_stages(self._graph)
        (output,) = self._graph.find_nodes(op="output")
        self._output = output
        nodes = [one for one in self._graph.nodes if one.op == "call_function"]
        orders = {one: i for i, one in enumerate(self._graph.nodes)}
        stacks = (one.meta.get("nn_module_stack") for one in nodes)
        self._outside = dict(list(next(filter(None, stacks), {}).items())[:1])
        stages = _stages(self._plan, nodes)
        self._place = {one: (stages.get(one, 0), i) for one, i in orders.items()}
        self._place[output] = self._plan.stages - 1, inf
        self._check_writes()
        for node in nodes:
            self._copy_what_is_written(node)
        for node in list(self._place):
            if node.op != "get_attr":
                self._pass_on(node)
        for node in output.all_input_nodes:
            if self._stage(node) != self._stage(output) or node.op != "call_function":
                output.replace_input_with(node, self._add("alias", node, self._stage(output)))
        stage = 0
        ordered = sorted(self._place, key=self._place.__getitem__)
        ordered = [one for one in ordered if one.op == "call_function"]
        for node in ordered:
            for _ in range(stage, self._stage(node)):
                with self._graph.inserting_before(output):
                    self._graph.call_function(aten_pipe_split_alias)
            stage = self._stage(node)
            output.prepend(node)
        for stage in range(self._plan.stages):
            name_frames(one for one in ordered if self._stage(one) == stage)
        self._graph.lint()
        module.recompile()
        return module

    def _stage(self, node: Any) -> int:
        return self._place[node][0]

    def _add(self, op: str, value: Any, stage: int, before: Any = None) -> Any:
        """Return a new node that calls an operator of ATen on a value, before a node or at a stage's end."""
        import torch

        call = getattr(torch.ops.aten, op).default
        with self._graph.inserting_before(self._output):
            made = self._graph.call_function(call, (value,))
        made.meta["val"] = call(value.meta["val"])
        made.meta["nn_module_stack"] = self._outside if before is None else before.meta["nn_module_stack"]
        self._place[made] = stage, inf if before is None else self._place[before][1] - 0.5
        return made

    def _pass_on(self, node: Any) -> None:
        """Hand a value from stage to stage, as far as it is read."""
        import torch

        first = self._stage(node)
        readers = [one for one in node.users if self._stage(one) > first]
        if not readers:
            return
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise PartitionError(
                f"stage {first} makes {node.name} ({type(value).__name__}), which {readers[0].name} of "
                f"stage {self._stage(readers[0])}, in module {module_of(readers[0])!r}, reads; tensors alone "
                "cross"
            )
        sent = node
        if node in self._in_buffers:  # the next micro-batch may write to the buffer before this value is read
            sent = self._add("clone", node, first)
        elif not value.is_contiguous() or node.op == "placeholder":
            sent = self._add("alias" if value.is_contiguous() else "contiguous", node, first)
        for stage in range(first + 1, max(map(self._stage, readers)) + 1):
            for reader in readers:
                if self._stage(reader) == stage:
                    reader.replace_input_with(node, sent)
            if any(self._stage(one) > stage for one in readers):
                sent = self._add("alias", sent, stage)

    def _copy_what_is_written(self, node: Any) -> None:
        """Copy a value of an earlier stage that an op writes to, for the op and later ones to use instead."""
        stage, order = self._place[node]
        for value in written(node):
            if value.op != "get_attr" and self._stage(value) != stage:
                copy = self._add("clone", value, stage, node)
                for user in list(value.users):
                    if self._place[user][1] >= order:
                        user.replace_input_with(value, copy)

    def _check_writes(self) -> None:
        """Raise PartitionError for a write that another stage would have to see, or must not see."""
        families = defaultdict[Any, list[Any]](list)
        root_of = roots(self._place)
        for node, root in root_of.items():
            families[root].append(node)
        changed = {root_of[value] for node in self._place for value in written(node)}
        self._in_buffers = {
            node for node, root in root_of.items() if root in changed and root.op == "get_attr"
        }
        for node, (stage, order) in self._place.items():
            for value in written(node):
                earlier = [one for one in families[root_of[value]] if self._place[one][1] < order]
                for read, user in ((one, user) for one in earlier for user in one.users if user is not node):
                    if self._is_lost(node, value, read, user):
                        root = root_of[value]
                        name = root.target if root.op == "get_attr" else value.name
                        raise PartitionError(
                            f"{node.name} in module {module_of(node)!r} of stage {stage} writes to "
                            f"{name}, which {user.name} in module {module_of(user)!r} of stage "
                            f"{self._stage(user)} reads; a write reaches no other stage: cut elsewhere, "
                            "with other `stages` or `tolerance`, or write to a copy in the model"
                        )

    def _is_lost(self, node: Any, value: Any, read: Any, user: Any) -> bool:
        """Return True if a user of memory that a node writes to would read something else than in the model.

        value: the one that the node writes to.  read: the one in the same memory that the user reads.
        """
        (stage, order), (seen, when) = self._place[node], self._place[user]
        if read.op == "get_attr":
            return seen != stage
        if when < order:
            return seen > stage
        stages = {self._stage(read), self._stage(value), stage}
        return seen < stage or (read is not value and len(stages) > 1)


def _stages(plan: Plan, nodes: Sequence[Any]) -> dict[Any, int]:
    """Return the stage of each node: that of its op in the plan.

    A node without an op is in the stage of the node before it, and none is ahead of the values that it reads.
    A buffer is assigned, which an exported graph does at its end, where it is read last.
    Raises PartitionError where a stage has no node.
    """
    planned = [(one.type, one.module) for one in plan.ops]
    exported = [(type_of(one), module_of(one)) for one in nodes]
    matcher = SequenceMatcher(None, planned, exported, autojunk=False)
    known = {
        block.b + i: plan.ops[block.a + i].stage
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    }
    stage, found = 0, dict[Any, int]()
    for i, node in enumerate(nodes):
        stage = known.get(i, stage)
        read = [found[one] for one in node.all_input_nodes if one in found]
        if is_assignment(node):
            buffer, value = node.args
            users = [found[one] for one in buffer.users if one in found]
            found[node] = max([found.get(value, 0), *users])
        else:
            found[node] = max(read) if node.target is operator.getitem else max([stage, *read])
    missing = sorted(set(range(plan.stages)) - set(found.values()))
    if missing:
        raise PartitionError(
            f"the exported model has no op of the stages {missing} of the plan; trace the same model, in "
            "the same mode, with inputs of the same form, or give fewer stages where that is a stage of the "
            "loss alone"
        )
    return found
