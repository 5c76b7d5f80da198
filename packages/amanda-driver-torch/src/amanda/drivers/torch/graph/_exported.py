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
        refused.  Refusals and reports go to `inlining`.
        """
        module = self._program.module()
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        example = [node.meta.get("val") for node in placeholders]
        program = GraphProgram(inlining.state, every=True)
        stored: list[Action] = []
        analysis = inlining.analysis(
            TENSORS, lambda plan, facts: stored.extend(_actions_on_weights(plan, facts))
        )
        op_namespace = Namespace(f"{namespace()}/static")
        with apply():  # so that native calls are seen
            rewriting = FxRewriting(
                module, GraphSymbols(module, example, example), program, op_namespace, analysis=analysis
            )
            rewritten = rewriting.rewrite()
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
        for action in stored:
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
        """Write the program, with `about`, on its tools, in a file of the archive."""
        assert self._exported is not None
        notes = [*json.loads(self._notes[NOTES_NAME] or "[]"), about]
        content = BytesIO()  # what PyTorch writes itself aborts the process when the disk is full
        torch.export.save(self._exported, content, extra_files={NOTES_NAME: json.dumps(notes, indent=1)})
        path.write_bytes(content.getbuffer())


def _dynamic_shapes(program: ExportedProgram, module: Any) -> Any:
    """Return the dynamic sizes of a program's inputs, in the form that `torch.export.export` takes."""
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    # Parameters, buffers and constants come first among the placeholders.
    user_values = values[len(values) - len(program.graph_signature.user_inputs) :]
    dims: dict[str, Any] = {}
    sizes_by_input = [_dynamic_sizes(value, program, dims) for value in user_values]
    if not dims:
        return None
    auto = torch.export.Dim.AUTO
    if auto in dims.values():  # torch takes no named sizes beside it
        sizes_by_input = [None if sizes is None else dict.fromkeys(sizes, auto) for sizes in sizes_by_input]
    args, kwargs = tree_unflatten(sizes_by_input, program.call_spec.in_spec)
    names = inspect.signature(module.forward).parameters
    return dict(zip(names, [*args, *kwargs.values()], strict=True))


def _dynamic_sizes(value: Any, program: ExportedProgram, dims: dict[str, Any]) -> Any:
    """Return the dynamic dimensions of an input by axis; None if it has none, or is not a tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    symbolic_sizes = {i: size for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
    return {i: _dimension(size, program, dims) for i, size in symbolic_sizes.items()} or None


def _dimension(size: Any, program: ExportedProgram, dims: dict[str, Any]) -> Any:
    """Return the dimension of a size: named, with its range, if the size is one symbol, else `Dim.AUTO`.

    dims: dimensions by the text of the size; a new one is added, as equal sizes share a dimension.
    """
    name = str(size)
    if not name.isidentifier():
        dims[name] = torch.export.Dim.AUTO
    if name not in dims:
        ranges = {str(symbol): limits for symbol, limits in program.range_constraints.items()}
        lower = _range_end(ranges[name].lower) if name in ranges else None
        upper = _range_end(ranges[name].upper) if name in ranges else None
        dims[name] = torch.export.Dim(name, min=lower, max=upper)
    return dims[name]


def _range_end(value: Any) -> int | None:
    """Return an end of a range as a number; None for a range without that end."""
    return int(value) if isinstance(value, int) or getattr(value, "is_Integer", False) else None


def _actions_on_weights(plan: Plan, facts: OpFacts) -> Iterator[Action]:
    """Yield the actions at an op whose routines get weights alone."""
    for action in plan.before:
        values = [(facts.inputs or [])[i] for i in action.select or ()]
        if values and all(_is_known_before_run(value, facts) for value in values):
            yield action


def _is_known_before_run(value: Any, facts: OpFacts) -> bool:
    """Return True if a value is known before the graph runs."""
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
    """Folding of a program's constants.

    values: of nodes that depend on stored tensors alone.  sources: for each computed node that depends on a
    new constant, the placeholders that the node depends on.  new_placeholders: placeholders of new constants.
    """

    def __init__(self, program: ExportedProgram, old_constants: Mapping[str, Any]) -> None:
        """Find the stored tensors that the program does not write, and the new constants among them."""
        self.program = program
        self.old_constants = old_constants
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        specs = zip(placeholders, program.graph_signature.input_specs, strict=True)
        self.targets = {node: spec.target for node, spec in specs if spec.kind in _TENSOR_KINDS}
        # A buffer that the program writes has no constant value.
        changed = {*program.graph_signature.buffers_to_mutate.values()}
        self.values = {
            node: self._stored_tensor(name)
            for node, name in self.targets.items()
            if name and name not in changed
        }
        self.new_placeholders = {
            node
            for node, value in self.values.items()
            if self.targets[node] in program.constants
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
            [node for node in self.targets if not node.users and self._may_be_dropped(node)]
        )
        self.program.graph.lint()
        self.program.graph_module.recompile()

    def _compute_value(self, node: Node) -> None:
        """Compute a node's value if all its inputs have values and one depends on a new constant."""
        inputs = node.all_input_nodes
        if (
            node.op != "call_function"
            or not inputs
            or any(node_input not in self.values for node_input in inputs)
        ):
            return
        sources = {
            source
            for node_input in inputs
            for source in ({node_input} if node_input in self.targets else self.sources.get(node_input, ()))
        }
        if not sources & self.new_placeholders:
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        with torch.no_grad():
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        self.sources[node] = sources

    def _find_placeholders(self) -> dict[Node, Node]:
        """Return the placeholder that takes the value of each folded node that the rest of the program reads.

        A node without one stays computed, and what it depends on keeps its value.
        """
        last_nodes = [node for node in self.sources if any(user not in self.sources for user in node.users)]
        # What is returned stays computed, because the signature names outputs by their nodes.
        storable_nodes = [node for node in last_nodes if all(user.op != "output" for user in node.users)]
        takers: dict[Node, Node] = {}
        for node in storable_nodes:
            candidates = [
                placeholder
                for placeholder in self.sources[node]
                if self._can_take(placeholder, node, storable_nodes, takers)
            ]
            if candidates:
                # Weights first: their names are those of the model.
                takers[node] = min(candidates, key=lambda candidate: candidate in self.new_placeholders)
        while True:
            read_placeholders = {
                source for node in last_nodes if node not in takers for source in self.sources[node]
            }
            remaining = {node: taker for node, taker in takers.items() if taker not in read_placeholders}
            if len(remaining) == len(takers):
                return takers
            takers = remaining

    def _can_take(
        self,
        placeholder: Node,
        node: Node,
        storable_nodes: Collection[Node],
        takers: Mapping[Node, Node],
    ) -> bool:
        """Return True if a stored tensor can take a node's value: only folded nodes read it.

        Nodes share it if their values are equal; a weight only if those of all that depend on it are.
        takers: placeholders of the nodes so far.
        """
        if any(user not in self.sources for user in placeholder.users):
            return False
        value, stored_value = self.values[node], self.values[placeholder]
        if placeholder in self.new_placeholders:
            sharing_nodes = [other for other, taker in takers.items() if taker is placeholder]
        elif stored_value.shape == value.shape and stored_value.dtype == value.dtype:
            sharing_nodes = [other for other in storable_nodes if placeholder in self.sources[other]]
        else:
            return False
        return all(_are_equal(self.values[other], value) for other in sharing_nodes)

    def _move_value_to_placeholder(self, node: Node, placeholder: Node) -> None:
        """Write a node's value over a placeholder's tensor, which the rest of the program reads instead."""
        name = str(self.targets[placeholder])
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
        return node in self.new_placeholders or self.targets[node] in self.old_constants

    def _drop_placeholders(self, nodes: Sequence[Node]) -> None:
        """Drop placeholders with their tensors and their entries in the signature."""
        signature, program = self.program.graph_signature, self.program
        dropped_names = {str(self.targets[node]) for node in nodes}
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
