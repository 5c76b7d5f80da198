"""Files of torch.export, with routines written into them."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import torch
from amanda import apply
from amanda.backend import Action, Artefact, Inlining, Namespace, OpFacts
from amanda.errors import AmandaError, ArtefactError
from amanda.plan import Plan
from torch.utils._pytree import tree_unflatten

from ._constants import store_constants
from ._instrument import namespace
from ._ops import TENSORS, GraphProgram
from ._rewrite import FxRewriting
from ._symbols import GraphSymbols

if TYPE_CHECKING:
    from torch.export import ExportedProgram

NOTES_NAME = "amanda.json"


class ExportedFile(Artefact):
    """File that `torch.export.save` has written.

    The rewritten program has the names of parameters and buffers, the inputs, the dynamic sizes, and the
    modules and lines of ops of the first. A value that a routine computes from parameters alone is stored
    instead of them.
    """

    api = 1
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
            inlining.leave(subject, reason, where)
        self._exported = None
        if rewritten is None or program.called_as_python:
            return
        # A new export turns routines into operators and makes a new signature.
        args, kwargs = self._copy_example()
        sizes = _dynamic_shapes(self._program, rewritten)
        self._exported = torch.export.export(rewritten, args, kwargs, dynamic_shapes=sizes, strict=False)
        store_constants(self._exported, self._program.constants)
        for action in stored:
            inlining.stored(action)

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
