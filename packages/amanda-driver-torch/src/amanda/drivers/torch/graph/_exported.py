"""Files of torch.export, with routines written into them, and values of constants alone folded."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import torch
from amanda import apply
from amanda.backend import Action, Artefact, Inlining, Namespace, OpFacts
from amanda.errors import AmandaError, ArtefactError
from amanda.plan import Plan
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_unflatten

from ._instrument import namespace
from ._ops import TENSORS, GraphProgram
from ._rewrite import FxRewriting
from ._symbols import GraphSymbols

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

NOTES_NAME = "amanda.json"


class ExportedFile(Artefact):
    """File that `torch.export.save` has written.

    The rewritten program has the names of parameters and buffers, the inputs, the dynamic sizes, and the
    modules and lines of ops of the first. A value that a routine computes from parameters alone is stored
    instead of them.
    """

    api = 2
    kind = "torch.export program"

    def __init__(self, path: Path) -> None:
        """Load the file and the notes in it; raise ArtefactError if torch cannot read it."""
        self._path = path
        self._notes = {NOTES_NAME: ""}
        if not is_zipfile(path):  # which torch logs with a traceback
            raise ArtefactError(f"{path} is not a readable torch.export file: it is not a zip archive")
        try:
            self._program: ExportedProgram = torch.export.load(path, extra_files=self._notes)
        except Exception as error:  # of many kinds, from what unpacks, reads and builds it
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ArtefactError(f"{path} is not a readable torch.export file: {reason}") from error
        self._exported: ExportedProgram | None = None

    def instrument(self, inlining: Inlining) -> None:
        """Rewrite the graph, and export it again, which makes routines operators of it.

        Nothing is exported if tools insert nothing, or if a routine would be called as Python: that is
        refused.  inlining: the tools' state; gets refusals, reports, and actions whose results are stored.
        Raises ArtefactError for a program without example inputs.
        """
        module = self._program.module()
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        inputs = [node.meta.get("val") for node in placeholders]
        program = GraphProgram(inlining.state, runs_outside_scopes=True)
        actions_on_weights: list[Action] = []
        analysis = inlining.analysis(
            TENSORS, lambda plan, facts: actions_on_weights.extend(_actions_on_weights(plan, facts))
        )
        symbols, op_namespace = GraphSymbols(module, inputs, inputs), Namespace(f"{namespace()}/static")
        with apply():  # so that native calls are seen
            rewritten = FxRewriting(module, symbols, program, op_namespace, analysis=analysis).rewrite()
        for action, (facts, reason) in program.called_as_python.items():
            inlining.refuse(action, facts, reason)
        for subject, reason, where in program.reports:
            inlining.record_uninstrumented(subject, reason, where)
        self._exported = None
        if rewritten is None or program.called_as_python:
            return
        # A new export turns routines into operators and makes a new signature.
        args, kwargs = self._copy_example()
        sizes = _dynamic_shapes(self._program, rewritten)
        self._exported = torch.export.export(rewritten, args, kwargs, dynamic_shapes=sizes, strict=False)
        store_constants(self._exported, self._program.constants)
        for action in actions_on_weights:
            inlining.record_stored(action)

    def _copy_example(self) -> tuple[Any, Any]:
        """Return copies of the arguments that the program was exported with.

        Raises ArtefactError for a program without them.
        """
        if self._program.example_inputs is None:
            raise ArtefactError(
                f"{self._path} has no example of what it is called with: set program.example_inputs = (args, "
                "kwargs) before torch.export.save"
            )
        args, kwargs = copy.deepcopy(self._program.example_inputs)
        return args, kwargs

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the exported program to a file, with a note about its tools after the notes that it has."""
        assert self._exported is not None
        notes = [*json.loads(self._notes[NOTES_NAME] or "[]"), about]
        content = BytesIO()  # what PyTorch writes itself aborts the process when the disk is full
        torch.export.save(self._exported, content, extra_files={NOTES_NAME: json.dumps(notes, indent=1)})
        path.write_bytes(content.getbuffer())


def _dynamic_shapes(program: ExportedProgram, module: Any) -> Any:
    """Return the dynamic sizes of a program's inputs, as `torch.export.export` takes them; None without.

    All are `Dim.AUTO` if any is.
    """
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    # Parameters, buffers and constants come first among the placeholders.
    user_inputs = values[len(values) - len(program.graph_signature.user_inputs) :]
    dim_by_size: dict[str, Any] = {}
    sizes_by_input = [_dynamic_sizes(value, program, dim_by_size) for value in user_inputs]
    if not dim_by_size:
        return None
    auto = torch.export.Dim.AUTO
    if auto in dim_by_size.values():  # torch takes no named sizes beside it
        sizes_by_input = [None if sizes is None else dict.fromkeys(sizes, auto) for sizes in sizes_by_input]
    args, kwargs = tree_unflatten(sizes_by_input, program.call_spec.in_spec)
    names = inspect.signature(module.forward).parameters
    return dict(zip(names, [*args, *kwargs.values()], strict=True))


def _dynamic_sizes(value: Any, program: ExportedProgram, dim_by_size: dict[str, Any]) -> Any:
    """Return the dynamic dimensions of an input by axis; None if it has none, or is not a tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    symbolic_sizes = {i: size for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
    return {i: _dimension(size, program, dim_by_size) for i, size in symbolic_sizes.items()} or None


def _dimension(size: Any, program: ExportedProgram, dim_by_size: dict[str, Any]) -> Any:
    """Return the dimension of a size: named, with its range, if the size is one symbol, else `Dim.AUTO`.

    dim_by_size: by the text of a size; a new dimension is added, as equal sizes share a dimension.
    """
    name = str(size)
    if not name.isidentifier():
        dim_by_size[name] = torch.export.Dim.AUTO
    if name not in dim_by_size:
        ranges = {str(symbol): limits for symbol, limits in program.range_constraints.items()}
        lower = _range_end(ranges[name].lower) if name in ranges else None
        upper = _range_end(ranges[name].upper) if name in ranges else None
        dim_by_size[name] = torch.export.Dim(name, min=lower, max=upper)
    return dim_by_size[name]


def _range_end(value: Any) -> int | None:
    """Return an end of a range as a number; None for a range without that end."""
    return int(value) if isinstance(value, int) or getattr(value, "is_Integer", False) else None


def _actions_on_weights(plan: Plan, facts: OpFacts) -> Iterator[Action]:
    """Yield the actions before an op that select weights, or values computed from weights, alone."""
    inputs = facts.inputs or []
    for action in plan.before:
        selected_inputs = [inputs[i] for i in action.select or ()]
        if selected_inputs and all(_is_known_before_run(value, facts) for value in selected_inputs):
            yield action


def _is_known_before_run(value: Any, facts: OpFacts) -> bool:
    """Return True if a value can be computed before the graph runs, which is tried here."""
    try:
        facts.read_value(value)
    except AmandaError:
        return False
    return True


_TENSOR_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def store_constants(program: ExportedProgram, old_constants: Mapping[str, Any]) -> None:
    """Fold values that depend on new constants and on weights alone into stored tensors.

    old_constants: the constants before the program was exported again, which renames constants: a constant
    equal to one of them is not new.  A folded value goes into a weight that nothing else reads, if there is
    one, else into the new constant.  Where one place would have to hold two different values, both stay
    computed.
    """
    _ConstantFolder(program, old_constants).fold()


class _ConstantFolder:
    """Folding of values that depend on stored tensors of a program alone into such tensors.

    tensor_names: of stored tensors, by placeholder.  values: of nodes that depend on stored tensors alone.
    sources: for each folded node, which depends on a new constant, the placeholders that it depends on.
    new_placeholders: placeholders of new constants.
    """

    def __init__(self, program: ExportedProgram, old_constants: Mapping[str, Any]) -> None:
        """Find the stored tensors that the program does not write, and the new constants among them."""
        self.program = program
        self.old_constants = old_constants
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        specs = zip(placeholders, program.graph_signature.input_specs, strict=True)
        self.tensor_names = {node: spec.target for node, spec in specs if spec.kind in _TENSOR_KINDS}
        # A buffer that the program writes has no constant value.
        written_buffer_names = {*program.graph_signature.buffers_to_mutate.values()}
        self.values = {
            node: self._stored_tensor(name)
            for node, name in self.tensor_names.items()
            if name and name not in written_buffer_names
        }
        self.new_placeholders = {
            node
            for node, value in self.values.items()
            if self.tensor_names[node] in program.constants
            and not any(_are_equal(value, constant) for constant in old_constants.values())
        }
        self.sources: dict[Node, set[Node]] = {}

    def fold(self) -> None:
        """Compute the values, store those that other nodes read, and drop what nothing reads any more."""
        for node in self.program.graph.nodes:
            self._compute_value(node)
        for node, placeholder in self._find_placeholders().items():
            self._move_value_to_placeholder(node, placeholder)
        for node in reversed([*self.sources]):  # users before what they use
            if not node.users:
                self.program.graph.erase_node(node)
        self._drop_placeholders(
            [node for node in self.tensor_names if not node.users and self._may_be_dropped(node)]
        )
        self.program.graph.lint()
        self.program.graph_module.recompile()

    def _compute_value(self, node: Node) -> None:
        """Compute a node's value if all its inputs have values and one depends on a new constant."""
        inputs = node.all_input_nodes
        have_values = all(input_node in self.values for input_node in inputs)
        if node.op != "call_function" or not inputs or not have_values:
            return
        sources: set[Node] = set()
        for input_node in inputs:
            sources |= (
                {input_node} if input_node in self.tensor_names else self.sources.get(input_node, set())
            )
        if not sources & self.new_placeholders:
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        with torch.no_grad():
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        self.sources[node] = sources

    def _find_placeholders(self) -> dict[Node, Node]:
        """Return, for folded nodes that the rest of the program reads, the placeholder that takes the value.

        A node without one stays computed, and the placeholders that it depends on keep their values.
        """
        last_nodes = [node for node in self.sources if any(user not in self.sources for user in node.users)]
        # What is returned stays computed, because the signature names outputs by their nodes.
        storable_nodes = [node for node in last_nodes if all(user.op != "output" for user in node.users)]
        placeholder_by_node: dict[Node, Node] = {}
        for node in storable_nodes:
            candidates = [
                placeholder
                for placeholder in self.sources[node]
                if self._can_take(placeholder, node, storable_nodes, placeholder_by_node)
            ]
            if candidates:
                # Weights first: their names are those of the model.
                placeholder_by_node[node] = min(
                    candidates, key=lambda candidate: candidate in self.new_placeholders
                )
        while True:  # a node that loses its placeholder stays computed, from placeholders that are then read
            computed_nodes = [node for node in last_nodes if node not in placeholder_by_node]
            read_placeholders = {source for node in computed_nodes for source in self.sources[node]}
            remaining_placeholders = {
                node: placeholder
                for node, placeholder in placeholder_by_node.items()
                if placeholder not in read_placeholders
            }
            if len(remaining_placeholders) == len(placeholder_by_node):
                return placeholder_by_node
            placeholder_by_node = remaining_placeholders

    def _can_take(
        self, placeholder: Node, node: Node, storable_nodes: Collection[Node],
        placeholder_by_node: Mapping[Node, Node],
    ) -> bool:  # fmt: skip
        """Return True if the tensor of a placeholder that only folded nodes read can take a node's value.

        Nodes share a new constant if their values are equal; a weight only if the values of all nodes that
        depend on it are.  placeholder_by_node: what nodes have so far.
        """
        if any(user not in self.sources for user in placeholder.users):
            return False
        value, stored_value = self.values[node], self.values[placeholder]
        if placeholder in self.new_placeholders:
            sharing_nodes = [other for other, taken in placeholder_by_node.items() if taken is placeholder]
        elif stored_value.shape == value.shape and stored_value.dtype == value.dtype:
            sharing_nodes = [other for other in storable_nodes if placeholder in self.sources[other]]
        else:
            return False
        return all(_are_equal(self.values[other], value) for other in sharing_nodes)

    def _move_value_to_placeholder(self, node: Node, placeholder: Node) -> None:
        """Write a node's value over a placeholder's tensor, which the rest of the program reads instead."""
        name = str(self.tensor_names[placeholder])
        old_value = self._stored_tensor(name)
        new_value = self.values[node].detach().clone()
        if isinstance(old_value, torch.nn.Parameter):
            new_value = torch.nn.Parameter(new_value, old_value.requires_grad)
        holder = self.program.constants if name in self.program.constants else self.program.state_dict
        holder[name] = new_value
        placeholder.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(placeholder, delete_user_cb=lambda user: user not in self.sources)

    def _stored_tensor(self, name: Any) -> Any:
        """Return the weight, buffer or constant of a name."""
        weight = self.program.state_dict.get(name)
        return self.program.constants[name] if weight is None else weight

    def _may_be_dropped(self, node: Node) -> bool:
        """Return True for a constant, new or old; weights stay in the program also if nothing reads them."""
        return node in self.new_placeholders or self.tensor_names[node] in self.old_constants

    def _drop_placeholders(self, nodes: Sequence[Node]) -> None:
        """Drop placeholders with their tensors and their entries in the signature."""
        signature, program = self.program.graph_signature, self.program
        dropped_names = {str(self.tensor_names[node]) for node in nodes}
        signature.input_specs[:] = [
            spec for spec in signature.input_specs if spec.target not in dropped_names
        ]
        for node in nodes:
            program.graph.erase_node(node)
        for name in dropped_names:
            program.constants.pop(name, None)
            program.state_dict.pop(name, None)


def _are_equal(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return first is second
    return first.dtype == second.dtype and first.device == second.device and torch.equal(first, second)
