"""An exported graph of PyTorch, cut by a plan: the stage of each node, and what goes from stage to stage.

`torch.distributed.pipelining` sends a value to one other stage, which must not write to it, and only as
dense memory. So a value goes from stage to stage until its last reader has it, and an op that writes to a
value of an earlier stage writes to a copy.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from math import inf
from typing import Any

from amanda.tools.kit import leaves
from amanda.tools.mapping import torch_word
from amanda.tools.partition._cut import PartitionError, Plan


class CutGraph:
    """Split policy for PyTorch's pipelining: cuts the graph of an exported program as a plan says.

    Each node has a position: its stage, and its order in the graph; `inf` is the end of a stage.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._position: dict[Any, tuple[int, float]] = {}
        self._in_buffers: set[Any] = set()

    def __call__(self, module: Any) -> Any:
        """Order the nodes of a graph module by their stages, with a split mark between two stages.

        Changes and returns the module itself, without unread parameters, and with nodes that hand values on
        from stage to stage or clone those that are written.
        Raises PartitionError for a graph of another model than the plan's, and for values that cannot cross.
        """
        self._graph = module.graph
        # Checked ahead: PyTorch's error would name nodes that the user has never seen.
        check_no_nested_graphs(module)
        remove_copies_onto_themselves(self._graph)
        for node in self._graph.find_nodes(op="get_attr"):
            # The exporter lists every parameter; an unread one would be copied into the first stage.
            if not node.users:
                self._graph.erase_node(node)
        name_as_in_stages(self._graph)
        (self._output,) = self._graph.find_nodes(op="output")
        calls = [node for node in self._graph.nodes if node.op == "call_function"]
        self._place_nodes(calls)
        self._check_writes()
        for node in calls:
            self._clone_written_inputs(node)
        # A copy of the list: nodes are added meanwhile.
        for node in list(self._position):
            if node.op != "get_attr":
                self._send_to_later_stages(node)
        # PyTorch takes the model's outputs from ops of the last stage.
        last_stage = self._plan.stages - 1
        for node in self._output.all_input_nodes:
            if self._stage_of(node) != last_stage or node.op != "call_function":
                self._output.replace_input_with(node, self._add_node("alias", node, last_stage))
        self._order_by_stages()
        self._graph.lint()
        module.recompile()
        return module

    def _place_nodes(self, calls: Sequence[Any]) -> None:
        """Set the position of each node, and the module frame that nodes at a stage's end will get.

        calls: the nodes that are ops.  Raises PartitionError for a stage without nodes.
        """
        stages = _stages_of_nodes(self._plan, calls)
        # Inputs, parameters and buffers have no stage in the plan: they count as of the first.
        self._position = {node: (stages.get(node, 0), i) for i, node in enumerate(self._graph.nodes)}
        # The end of the last stage, behind whatever is added to it.
        self._position[self._output] = self._plan.stages - 1, inf
        stacks = (node.meta.get("nn_module_stack") for node in calls)
        first_stack: dict[Any, Any] = next(filter(None, stacks), {})
        # A stack begins with the frame of the whole model.
        self._root_frame = dict(list(first_stack.items())[:1])

    def _order_by_stages(self) -> None:
        """Move the nodes into the order of their stages, with a split mark between two; set module frames."""
        from torch.distributed.pipelining._IR import aten_pipe_split_alias

        output = self._output
        calls = [node for node in self._position if node.op == "call_function"]
        calls.sort(key=self._position.__getitem__)
        current_stage = 0
        for node in calls:
            while current_stage < self._stage_of(node):
                with self._graph.inserting_before(output):
                    self._graph.call_function(aten_pipe_split_alias)
                current_stage += 1
            output.prepend(node)  # moves the node to the end
        for stage in range(self._plan.stages):
            set_module_frames(node for node in calls if self._stage_of(node) == stage)

    def _stage_of(self, node: Any) -> int:
        return self._position[node][0]

    def _add_node(self, op: str, value: Any, stage: int, before: Any = None) -> Any:
        """Return a new node that calls an operator of ATen, ahead of node `before` or at a stage's end."""
        import torch

        call = getattr(torch.ops.aten, op).default
        with self._graph.inserting_before(self._output):
            new_node = self._graph.call_function(call, (value,))
        # The fake value, from which PyTorch takes the shapes of buffers between stages.
        new_node.meta["val"] = call(value.meta["val"])
        new_node.meta["nn_module_stack"] = (
            self._root_frame if before is None else before.meta["nn_module_stack"]
        )
        # Half a place ahead of a node, as orders of nodes are whole numbers.
        order = inf if before is None else self._position[before][1] - 0.5
        self._position[new_node] = stage, order
        return new_node

    def _send_to_later_stages(self, node: Any) -> None:
        """Pass a value from its stage to the next, and so on to the last stage that reads it.

        A value that no later stage reads stays.  Raises PartitionError for a value that is not a tensor.
        """
        import torch

        first_stage = self._stage_of(node)
        readers = [user for user in node.users if self._stage_of(user) > first_stage]
        if not readers:
            return
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise PartitionError(
                f"stage {first_stage} makes {node.name} ({type(value).__name__}), which {readers[0].name} of "
                f"stage {self._stage_of(readers[0])}, in module {module_of(readers[0])!r}, reads; tensors "
                "alone cross"
            )
        sent_node = node
        if node in self._in_buffers:  # the next micro-batch may write to the buffer before this value is read
            sent_node = self._add_node("clone", node, first_stage)
        elif not value.is_contiguous():
            sent_node = self._add_node("contiguous", node, first_stage)
        elif node.op == "placeholder":  # a model's input: the pipeline sends results of ops alone
            sent_node = self._add_node("alias", node, first_stage)
        last_stage = max(map(self._stage_of, readers))
        for stage in range(first_stage + 1, last_stage + 1):
            for reader in readers:
                if self._stage_of(reader) == stage:
                    reader.replace_input_with(node, sent_node)
            if stage < last_stage:  # passed on by an op of this stage
                sent_node = self._add_node("alias", sent_node, stage)

    def _clone_written_inputs(self, node: Any) -> None:
        """Clone each value of an earlier stage that an op writes to; the op and later ones use the clone."""
        stage, order = self._position[node]
        for value in written_inputs(node):
            # A buffer is written in the stage that holds it.
            if value.op != "get_attr" and self._stage_of(value) != stage:
                clone = self._add_node("clone", value, stage, before=node)
                for user in list(value.users):
                    _, user_order = self._position[user]
                    # Users before the write see the value as it was.
                    if user_order >= order:
                        user.replace_input_with(value, clone)

    def _check_writes(self) -> None:
        """Raise PartitionError for a write whose effect on another stage differs from the model's.

        A write in one stage is not visible in another one: earlier readers there must not see the write, and
        later readers would have to.  Sets `_in_buffers`: the nodes in the memory of written buffers.
        """
        aliases_by_root = defaultdict[Any, list[Any]](list)
        root_of_node = memory_roots(self._position)
        for node, root in root_of_node.items():
            aliases_by_root[root].append(node)
        writes = [(node, value) for node in self._position for value in written_inputs(node)]
        written_buffers = {root for _, value in writes if (root := root_of_node[value]).op == "get_attr"}
        self._in_buffers = {node for node, root in root_of_node.items() if root in written_buffers}
        for writer, value in writes:
            root = root_of_node[value]
            stage, order = self._position[writer]
            earlier_aliases = [alias for alias in aliases_by_root[root] if self._position[alias][1] < order]
            reads = [(alias, user) for alias in earlier_aliases for user in alias.users]
            for alias, user in reads:
                if user is not writer and self._reads_other_value(writer, value, alias, user):
                    name = root.target if root.op == "get_attr" else value.name
                    raise PartitionError(
                        f"{writer.name} in module {module_of(writer)!r} of stage {stage} writes to "
                        f"{name}, which {user.name} in module {module_of(user)!r} of stage "
                        f"{self._stage_of(user)} reads; a write reaches no other stage: cut elsewhere, "
                        "with other `stages` or `tolerance`, or write to a copy in the model"
                    )

    def _reads_other_value(self, writer: Any, written_value: Any, alias: Any, reader: Any) -> bool:
        """Return True if a reader of memory that an op writes would get another value than in the model.

        written_value: the node that `writer` writes.  alias: a node in the same memory that `reader` reads.
        """
        (stage, order), (reader_stage, reader_order) = self._position[writer], self._position[reader]
        if alias.op == "get_attr":  # each stage has a buffer of its own
            return reader_stage != stage
        if reader_order < order:  # stages run in order, so a later stage would read after the write
            return reader_stage > stage
        # A read after the write: of the value itself it uses the stage's clone, but an alias from another
        # stage is not in the clone's memory.
        stages = {self._stage_of(alias), self._stage_of(written_value), stage}
        return reader_stage < stage or (alias is not written_value and len(stages) > 1)


def _stages_of_nodes(plan: Plan, nodes: Sequence[Any]) -> dict[Any, int]:
    """Return the stage of each node, from the op of the same type and module in the plan.

    A node without such an op is in the stage of the node before it.  No node is in an earlier stage than the
    values that it reads.  The assignment of a buffer, at the end of an exported graph, is in the last stage
    that reads the buffer.  Raises PartitionError for a stage without nodes.
    """
    planned_stages = _match_planned_stages(plan, nodes)
    planned_stage, stage_of = 0, dict[Any, int]()
    for node in nodes:
        # What the exporter has added belongs to the op before it.
        planned_stage = planned_stages.get(node, planned_stage)
        producer_stages = [stage_of[value] for value in node.all_input_nodes if value in stage_of]
        if is_assignment(node):
            buffer, value = node.args
            reader_stages = [stage_of[user] for user in buffer.users if user in stage_of]
            stage_of[node] = max([stage_of.get(value, 0), *reader_stages])
        elif node.target is operator.getitem:
            # An element is taken where its tuple is made: a tuple cannot cross.
            stage_of[node] = max(producer_stages)
        else:
            stage_of[node] = max([planned_stage, *producer_stages])
    missing = sorted(set(range(plan.stages)) - set(stage_of.values()))
    if missing:
        raise PartitionError(
            f"the exported model has no op of the stages {missing} of the plan; trace the same model, in "
            "the same mode, with inputs of the same form, or give fewer stages where that is a stage of the "
            "loss alone"
        )
    return stage_of


def _match_planned_stages(plan: Plan, nodes: Sequence[Any]) -> dict[Any, int]:
    """Return the stage of each node that matches an op of the plan, by their types and modules, in order."""
    plan_keys = [(op.type, op.module) for op in plan.ops]
    node_keys = [(trace_type(node), module_of(node)) for node in nodes]
    # The exporter adds and removes ops, so positions differ from the trace; the longest common runs agree.
    # Without autojunk, which would drop ops that occur often.
    matcher = SequenceMatcher(None, plan_keys, node_keys, autojunk=False)
    return {
        nodes[block.b + i]: plan.ops[block.a + i].stage
        for block in matcher.get_matching_blocks()
        for i in range(block.size)
    }


_CONTEXT_MANAGERS = {
    "wrap_with_set_grad_enabled": "torch.no_grad() or enable_grad()",
    "wrap_with_autocast": "torch.autocast",
    "wrap_inference_mode": "torch.inference_mode()",
}
"""Context managers as users write them, by the op that stands for them in an exported graph."""
_SUBSCRIPTS = {"index", "select", "slice"}
_NORMS_WITH_STATISTICS = {"batch_norm", "instance_norm"}


def trace_type(node: Any) -> str:
    """Return the type of a node in the words of a trace."""
    name = torch_word(node.target.__name__.partition(".")[0].rstrip("_"))
    # The exporter writes a subscript as several operators.
    return "getitem" if name in _SUBSCRIPTS else name


def module_of(node: Any) -> str:
    """Return the path of the module that calls a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _aliased_arguments(node: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the nodes whose memory the result of an op shares or the op writes, with True for a write."""
    schema = getattr(node.target, "_schema", None)
    # The schema says which arguments alias the result, and which are written.
    for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
        if argument.alias_info is not None:
            for alias in leaves([value]):
                yield alias, argument.alias_info.is_write


def written_inputs(node: Any) -> list[Any]:
    """Return the nodes that an op writes to by its schema, and the running statistics of a normalisation.

    The schema does not name these statistics.  A node that is not a call writes to none.
    """
    if node.op != "call_function":
        return []
    statistics = node.args[3:5] if trace_type(node) in _NORMS_WITH_STATISTICS else ()
    return [
        *(value for value, writes in _aliased_arguments(node) if writes),
        *(value for value in statistics if value),
    ]


def memory_roots(nodes: Iterable[Any]) -> dict[Any, Any]:
    """Return for each node the first node in the same memory, such as the tensor of a view."""
    root_of_node = dict[Any, Any]()
    for node in nodes:
        aliases = [argument for argument, _ in _aliased_arguments(node)] if node.op == "call_function" else []
        if node.target is operator.getitem:  # an element of a tuple, which is in the tuple's memory
            aliases = list(node.all_input_nodes)
        root_of_node[node] = root_of_node[aliases[0]] if aliases else node
    return root_of_node


def is_assignment(node: Any) -> bool:
    """Return True for the node by which an exported graph assigns a value to a buffer."""
    is_copy = node.op == "call_function" and node.name.startswith("copy__default")
    return is_copy and node.args[0].op == "get_attr" and not node.users


def remove_copies_onto_themselves(graph: Any) -> None:
    """Remove assignments of a buffer to itself, after an op has written it in place (`n += 1`)."""
    for node in list(graph.nodes):
        if is_assignment(node):
            buffer, value = node.args
            # Back along a chain of ops in place: each gives back its first argument.
            while value is not buffer and value.op == "call_function" and _is_in_place(value):
                value = value.args[0]
            if value is buffer:
                graph.erase_node(node)


def name_as_in_stages(graph: Any) -> None:
    """Name the parameters, buffers and inputs of a graph as PyTorch's `split_module` does in the stages.

    PyTorch finds the parameters of a stage by these names, also where an op has one of them, such as `mean`.
    """
    from torch.fx.graph import _Namespace

    stage_namespace, input_names = _Namespace(), set[str]()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            node.name = stage_namespace.create_name(graph._target_to_str(node.target), None)
            input_names.add(node.name)
    # Ops that had one of these names get another.
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr") and node.name in input_names:
            node.name = graph._graph_namespace.create_name(f"{node.name}_op", None)


def _is_in_place(node: Any) -> bool:
    """Return True for an op that gives back its first argument, to which it writes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and bool(alias.is_write) and len(schema.returns) == 1


def check_no_nested_graphs(module: Any) -> None:
    """Raise PartitionError for a block that the exporter keeps as one op with a graph of its own."""
    for node in module.graph.nodes:
        for block in node.all_input_nodes if node.op == "call_function" else ():
            if block.op == "get_attr" and hasattr(getattr(module, block.target, None), "graph"):
                name = getattr(node.target, "__name__", str(node.target))
                raise PartitionError(
                    f"module {module_of(node)!r} runs a block under {_CONTEXT_MANAGERS.get(name, name)}, "
                    "which PyTorch's exporter keeps apart and its pipeline cannot split; leave it out of the "
                    "model, compute it before and pass its values as inputs, or cut by hand"
                )


Frames = list[tuple[str, str]]
"""Path and key of each module call around a node, the outermost first; keys differ from call to call."""


def set_module_frames(nodes: Iterable[Any]) -> None:
    """Set the module calls of the nodes of a stage, from which PyTorch makes the modules of the stage.

    The first call at each path becomes a module.  Ops of later calls, and of a module that another module
    than its parent calls, become part of the call around them: for these PyTorch would copy parameters, or
    raise an error.
    """
    open_calls, module_paths = Frames(), set[str]()
    for node in nodes:
        # By the key of a module call, the path and the class of the module; "" is the path of the model.
        stack = dict(node.meta.get("nn_module_stack") or {})
        class_by_path = dict(stack.values())
        model_class = class_by_path.get("", "")
        calls = [(str(path), str(key)) for key, (path, _) in stack.items() if path]
        # PyTorch makes a submodule of each call; two calls of one module would give it twice.
        open_calls = _module_prefix(calls, open_calls, module_paths)
        module_paths.update(path for path, _ in open_calls)
        node.meta["nn_module_stack"] = {
            "": ("", model_class), **{path: (path, class_by_path[path]) for path, _ in open_calls}
        }  # fmt: skip


def _module_prefix(calls: Frames, open_calls: Frames, module_paths: set[str]) -> Frames:
    """Return the outermost calls of a node that can become modules.

    open_calls: those of the node before.  module_paths: of modules that exist already.
    """
    frames = Frames()
    for path, key in calls:
        is_child = not frames or path.startswith(f"{frames[-1][0]}.")
        is_open = open_calls[: len(frames) + 1] == [*frames, (path, key)]
        is_second_call = path in module_paths and not is_open
        if not is_child or is_second_call:
            break
        frames.append((path, key))
    return frames
