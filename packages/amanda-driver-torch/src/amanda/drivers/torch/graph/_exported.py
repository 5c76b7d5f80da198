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
from ._ops import TENSORS, Program
from ._rewrite import Rewriting
from ._symbols import Symbols

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ABOUT = "amanda.json"


class ExportedFile(Artefact):
    """A program that `torch.export.save` has written.

    Names of parameters and buffers, what it is called with, sizes that may change, and modules and lines of
    its ops are kept. What a routine makes of parameters alone is stored instead of them.
    """

    api = 1
    kind = "torch.export program"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._notes = {ABOUT: ""}
        if not is_zipfile(path):  # which torch logs with a traceback
            raise ArtefactError(f"{path} is no file of torch.export that can be read: it is no zip archive")
        try:
            self._program: ExportedProgram = torch.export.load(path, extra_files=self._notes)
        except Exception as error:  # of many kinds, from what unpacks, reads and builds it
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ArtefactError(f"{path} is no file of torch.export that can be read: {reason}") from error
        self._made: ExportedProgram | None = None

    def instrument(self, inlining: Inlining) -> None:
        """Rewrite the graph, and export it again, which makes routines operators of it."""
        module = self._program.module()
        places = [node for node in module.graph.nodes if node.op == "placeholder"]
        given = [node.meta.get("val") for node in places]
        program = Program(inlining.state, every=True)
        stored: list[Action] = []
        analysis = inlining.analysis(TENSORS, lambda found, facts: stored.extend(_of_weights(found, facts)))
        tags = Namespace(f"{namespace()}/static")
        with apply():  # so that native calls are seen
            rewriting = Rewriting(module, Symbols(module, given, given), program, tags, analysis=analysis)
            rewritten = rewriting.rewritten()
        for action, (facts, why) in program.called_as_python.items():
            inlining.refuse(action, facts, why)
        for what, why, where in program.reports:
            inlining.leave(what, why, where)
        self._made = None
        if rewritten is None or program.called_as_python:
            return
        args, kwargs = self._example()
        sizes = _sizes(self._program, rewritten)
        self._made = torch.export.export(rewritten, args, kwargs, dynamic_shapes=sizes, strict=False)
        store_constants(self._made, self._program.constants)
        for action in stored:
            inlining.stored(action)

    def _example(self) -> tuple[Any, Any]:
        if self._program.example_inputs is None:
            raise ArtefactError(
                f"{self._path} has no example of what it is called with: set program.example_inputs = (args, "
                "kwargs) before torch.export.save"
            )
        args, kwargs = copy.deepcopy(self._program.example_inputs)
        return args, kwargs

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the program, and what was done in a file within it."""
        assert self._made is not None
        notes = [*json.loads(self._notes[ABOUT] or "[]"), about]
        content = BytesIO()  # what PyTorch writes itself aborts the process when the disk is full
        torch.export.save(self._made, content, extra_files={ABOUT: json.dumps(notes, indent=1)})
        path.write_bytes(content.getbuffer())


def _sizes(program: ExportedProgram, module: Any) -> Any:
    """Return which sizes of what a program is called with may change, as `torch.export.export` takes it."""
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    values = values[len(values) - len(program.graph_signature.user_inputs) :]
    dims: dict[str, Any] = {}
    flat = [_sizes_of(value, program, dims) for value in values]
    if not dims:
        return None
    if torch.export.Dim.AUTO in dims.values():  # which does not go with sizes that have names
        flat = [None if one is None else dict.fromkeys(one, torch.export.Dim.AUTO) for one in flat]
    args, kwargs = tree_unflatten(flat, program.call_spec.in_spec)
    return dict(zip(inspect.signature(module.forward).parameters, [*args, *kwargs.values()], strict=True))


def _sizes_of(value: Any, program: ExportedProgram, dims: dict[str, Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    changing = {i: one for i, one in enumerate(value.shape) if isinstance(one, torch.SymInt)}
    return {i: _dim(one, program, dims) for i, one in changing.items()} or None


def _dim(size: Any, program: ExportedProgram, dims: dict[str, Any]) -> Any:
    """The dimension of a size: named, with its range, where it is one symbol; else to be found again."""
    name = str(size)
    if not name.isidentifier():
        dims[name] = torch.export.Dim.AUTO
    if name not in dims:
        found = {str(symbol): span for symbol, span in program.range_constraints.items()}.get(name)
        lower, upper = (None, None) if found is None else (_bound(found.lower), _bound(found.upper))
        dims[name] = torch.export.Dim(name, min=lower, max=upper)
    return dims[name]


def _bound(value: Any) -> int | None:
    """An end of a range; None of one without an end."""
    return int(value) if isinstance(value, int) or getattr(value, "is_Integer", False) else None


def _of_weights(plan: Plan, facts: OpFacts) -> Iterator[Action]:
    """The actions at an op whose routines are given weights alone."""
    for action in plan.before:
        values = [(facts.inputs or [])[i] for i in action.select or ()]
        if values and all(_is_known(value, facts) for value in values):
            yield action


def _is_known(value: Any, facts: OpFacts) -> bool:
    try:
        facts.read_value(value)
    except AmandaError:
        return False
    return True
